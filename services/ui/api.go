package ui

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
)

// maxPage is how many groups, samples or versions a page has.
const maxPage = 200

// maxRunsPage is how many runs a page has.
const maxRunsPage = 500

// badRequest returns an error that the client made.
func badRequest(format string, args ...any) error {
	return &requestError{http.StatusBadRequest, fmt.Sprintf(format, args...)}
}

// query is a request with the names and numbers in it. Its first fault is kept, and is the answer.
type query struct {
	*http.Request
	err error
}

// fault keeps the first thing that is wrong with the request.
func (q *query) fault(format string, args ...any) {
	if q.err == nil {
		q.err = badRequest(format, args...)
	}
}

// token reads a name of a request: of its path, or else of its query.
func token[T ~string](q *query, name string) T {
	v := T(cmp.Or(q.PathValue(name), q.FormValue(name)))
	if err := schemas.CheckToken(name, v); err != nil {
		q.fault("%v", err)
	}
	return v
}

func (q *query) run() schemas.Run { return token[schemas.Run](q, "run") }

func (q *query) uid() schemas.UID { return token[schemas.UID](q, "uid") }

// number reads a number of a request's query that lies between least and most; absent: def.
func (q *query) number(name string, def, least, most int) int {
	text := q.FormValue(name)
	if text == "" {
		return def
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < least || n > most {
		q.fault("%s: %q; must be a number from %d to %d", name, text, least, most)
	}
	return n
}

// sample reads the place of a sample: its index, or also its stage: 2.think.
func (q *query) sample() (index int64, stage schemas.Stage) {
	number, of, staged := strings.Cut(q.PathValue("sample"), ".")
	index, err := strconv.ParseInt(number, 10, 64)
	stage = schemas.Stage(of)
	if err != nil || index < 0 || index >= schemas.MaxGroupSize || staged && schemas.CheckToken("stage", stage) != nil {
		q.fault("that is not the index of a sample")
	}
	return index, stage
}

// letter reads the number of a dead letter.
func (q *query) letter() uint64 {
	id, err := strconv.ParseUint(q.PathValue("id"), 10, 64)
	if err != nil || id == 0 {
		q.fault("that is not the number of a dead letter")
	}
	return id
}

// ask answers with what read returns, if nothing is wrong with the request.
func ask[V any](q *query, read func(ctx context.Context) (V, error)) (any, error) {
	if q.err != nil {
		return nil, q.err
	}
	return read(q.Context())
}

// runList reads which runs a list has.
func (q *query) runList() view.RunList {
	l := view.RunList{
		Run: schemas.Run(q.FormValue("name")), Text: q.FormValue("text"), State: q.FormValue("state"),
		Model: q.FormValue("model"), Tag: q.FormValue("tag"), Order: q.FormValue("order"),
		Offset: q.number("offset", 0, 0, view.MaxRows), Limit: q.number("limit", 0, 1, maxRunsPage),
	}
	if orders := view.RunOrders(); l.Order != "" && !slices.Contains(orders, strings.TrimPrefix(l.Order, "-")) {
		q.fault("order: %q; must be one of %v, or one with - before it", l.Order, orders)
	}
	return l
}

func (s *server) answerRuns(q *query) (any, error) {
	l := q.runList()
	return ask(q, func(ctx context.Context) (*view.Runs, error) { return s.view.Runs(ctx, l) })
}

func (s *server) answerSystem(q *query) (any, error) { return s.view.System(q.Context()) }

func (s *server) answerRun(q *query) (any, error) {
	run := q.run()
	return ask(q, func(ctx context.Context) (*view.Progress, error) { return s.view.Progress(ctx, run) })
}

// answerSettings answers with what a run was asked for and made with.
func (s *server) answerSettings(q *query) (any, error) {
	run := q.run()
	return ask(q, func(ctx context.Context) (*view.Settings, error) { return s.view.Settings(ctx, run) })
}

// answerGroups answers with a page of the groups of a run: offset, limit, order, status and text say which.
func (s *server) answerGroups(q *query) (any, error) {
	run, l := q.run(), view.List{
		Order: cmp.Or(q.FormValue("order"), "newest"), Status: q.FormValue("status"), Text: q.FormValue("text"),
		Offset: q.number("offset", 0, 0, view.MaxRows), Limit: q.number("limit", 50, 1, maxPage),
	}
	if !slices.Contains(view.Orders, l.Order) {
		q.fault("order: %q; must be one of %v", l.Order, view.Orders)
	}
	return ask(q, func(ctx context.Context) (*view.Groups, error) { return s.view.Groups(ctx, run, l) })
}

// answerCurve answers with the rewards of a run over time, of one data source or of all.
func (s *server) answerCurve(q *query) (any, error) {
	run, most := q.run(), q.number("points", 400, 1, 2000)
	return ask(q, func(ctx context.Context) (*view.Curve, error) {
		return s.view.Curve(ctx, run, q.FormValue("data_source"), most)
	})
}

// answerUpdates answers with what trainers told of their updates.
func (s *server) answerUpdates(q *query) (any, error) {
	run, most := q.run(), q.number("points", 400, 1, 2000)
	return ask(q, func(ctx context.Context) (*view.Updates, error) { return s.view.Updates(ctx, run, most) })
}

// answerGroup answers with a group and a page of its samples.
func (s *server) answerGroup(q *query) (any, error) {
	run, uid, offset := q.run(), q.uid(), q.number("offset", 0, 0, schemas.MaxGroupSize)
	limit := q.number("limit", 64, 1, maxPage)
	return ask(q, func(ctx context.Context) (*view.Group, error) { return s.view.Group(ctx, run, uid, offset, limit) })
}

func (s *server) answerSample(q *query) (any, error) {
	run, uid := q.run(), q.uid()
	index, stage := q.sample()
	return ask(q, func(ctx context.Context) (*view.Sample, error) { return s.view.Sample(ctx, run, uid, index, stage) })
}

// trajectoryOf returns the trajectory that a request is about.
func (s *server) trajectoryOf(q *query) (*schemas.Trajectory, error) {
	run, uid := q.run(), q.uid()
	index, stage := q.sample()
	if q.err != nil {
		return nil, q.err
	}
	return s.view.Trajectory(q.Context(), run, uid, index, stage)
}

// answerCompare answers with the groups that the runs a and b have in common.
func (s *server) answerCompare(q *query) (any, error) {
	offset := q.number("offset", 0, 0, view.MaxRows)
	a, b := token[schemas.Run](q, "a"), token[schemas.Run](q, "b")
	return ask(q, func(ctx context.Context) (*view.Comparison, error) { return s.view.Compare(ctx, a, b, offset) })
}

func (s *server) answerLane(q *query) (any, error) {
	lane := token[schemas.Lane](q, "lane")
	return ask(q, func(ctx context.Context) (*view.Lane, error) { return s.view.Lane(ctx, lane, maxPage) })
}

// answerDead answers with dead letters of one run or of all, before the sequence before.
func (s *server) answerDead(q *query) (any, error) {
	run, before := schemas.Run("*"), uint64(0)
	if q.FormValue("run") != "" {
		run = q.run()
	}
	if text := q.FormValue("before"); text != "" {
		var err error
		if before, err = strconv.ParseUint(text, 10, 64); err != nil || before == 0 {
			q.fault("before: must be the number of a dead letter")
		}
	}
	return ask(q, func(ctx context.Context) (*view.Letters, error) { return s.view.Letters(ctx, run, before) })
}

// answerLetter answers with one dead letter and its original.
func (s *server) answerLetter(q *query) (any, error) {
	id := q.letter()
	return ask(q, func(ctx context.Context) (*view.Letter, error) { return s.view.Letter(ctx, id) })
}

// pngMagic is how a PNG file begins.
var pngMagic = []byte("\x89PNG\r\n\x1a\n")

// media answers with a file of a sample, or with one of its conditions or states.
func (s *server) media(w http.ResponseWriter, r *http.Request) {
	ctx, done := context.WithTimeout(r.Context(), readTimeout)
	defer done()
	release, err := s.admit(ctx)
	if err != nil {
		s.fail(w, r, err)
		return
	}
	defer release()
	t, err := s.trajectoryOf(&query{Request: r.WithContext(ctx)})
	if err != nil {
		s.fail(w, r, err)
		return
	}
	kind := r.PathValue("kind")
	tag := strconv.Quote(cmp.Or(t.ContentDigest, "none") + "-" + kind)
	w.Header().Set("ETag", tag)
	w.Header().Set("Cache-Control", "private, max-age=300")
	w.Header().Set("Content-Security-Policy", "default-src 'none'; sandbox")
	if r.Header.Get("If-None-Match") == tag {
		w.WriteHeader(http.StatusNotModified)
		return
	}
	data, contentType, err := s.file(ctx, t, kind)
	if err != nil {
		if errors.Is(err, client.ErrNoMedium) {
			err = &requestError{http.StatusNotFound, err.Error()}
		}
		w.Header().Del("ETag")
		w.Header().Set("Cache-Control", "no-cache")
		s.fail(w, r, err)
		return
	}
	w.Header().Set("Content-Type", contentType)
	s.write(w, data)
}

// contentTypes are those of the files of samples, by their kind.
var contentTypes = map[string]string{
	schemas.KindImage: "image/png", schemas.KindVideo: "image/apng", schemas.KindAudio: "audio/wav",
}

// kindMP4 is the video of a sample as mp4, with its sound.
const kindMP4 = "mp4"

// mp4 makes a file of kindMP4.
func (s *server) mp4(ctx context.Context, t *schemas.Trajectory) ([]byte, error) {
	var sound []byte
	video, err := s.client.Medium(ctx, t, schemas.KindVideo)
	if err == nil && t.Medium(schemas.KindAudio) != nil {
		sound, err = s.client.Medium(ctx, t, schemas.KindAudio)
	}
	if err != nil {
		return nil, err
	}
	data, err := media.MP4(ctx, video, sound)
	if errors.Is(err, media.ErrNoFFmpeg) {
		return nil, &requestError{http.StatusNotFound, err.Error()}
	}
	return data, err
}

// file returns a file of a sample, a condition or an image of a state, and its content type.
func (s *server) file(ctx context.Context, t *schemas.Trajectory, kind string) (data []byte, as string, err error) {
	magic := pngMagic
	switch as = contentTypes[kind]; {
	case kind == kindMP4:
		data, err = s.mp4(ctx, t)
		return data, "video/mp4", err
	case as != "":
		if data, err = s.client.Medium(ctx, t, kind); kind == schemas.KindAudio {
			magic = []byte("RIFF")
		}
	default:
		as = contentTypes[schemas.KindImage]
		if text, ok := strings.CutPrefix(kind, "condition-"); ok {
			i, numberErr := strconv.Atoi(text)
			if numberErr != nil || i < 0 || i >= len(t.Conditions) {
				return nil, "", &requestError{http.StatusNotFound, "the sample has no such condition"}
			}
			data, err = s.client.Condition(ctx, t.Conditions[i])
			break
		}
		number, predicted := strings.CutPrefix(kind, "seen-")
		index, numberErr := strconv.ParseInt(number, 10, 64)
		switch {
		case numberErr != nil || !slices.Contains(view.StatesOf(t), index):
			return nil, "", &requestError{http.StatusNotFound, "this state is not stored"}
		case !predicted && !view.IsGrid(t):
			return nil, "", &requestError{http.StatusNotFound, "the tokens of this state are no image"}
		}
		if !predicted {
			data, err = s.view.StateImage(ctx, t, index)
			break
		}
		data, err = s.view.Seen(ctx, t, index)
		if errors.Is(err, client.ErrUnseen) {
			return nil, "", &requestError{http.StatusNotFound, err.Error()}
		}
	}
	if err == nil && !bytes.HasPrefix(data, magic) {
		err = &requestError{http.StatusBadGateway, "what is stored as the " + kind + " is no PNG or WAV"}
	}
	return data, as, err
}
