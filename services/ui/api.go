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

func badRequest(format string, args ...any) error {
	return &requestError{http.StatusBadRequest, fmt.Sprintf(format, args...)}
}

// query is a request with the names and numbers in it. Its first fault is kept, and is the answer: it ends the context
// of the request, so that nothing is read for it. What is wrong is read as if it was not there.
type query struct {
	*http.Request
	refuse context.CancelFunc
	err    error
}

func (q *query) fault(format string, args ...any) {
	if q.err == nil {
		q.err = badRequest(format, args...)
		q.refuse()
	}
}

// token reads a name of a request: of its path, or else of its query.
func token[T ~string](q *query, name string) T {
	v := T(cmp.Or(q.PathValue(name), q.FormValue(name)))
	if err := schemas.CheckToken(name, v); err != nil {
		q.fault("%v", err)
		return ""
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
		return def
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
		return 0, ""
	}
	return index, stage
}

func (q *query) letter() uint64 {
	id, err := strconv.ParseUint(q.PathValue("id"), 10, 64)
	if err != nil || id == 0 {
		q.fault("that is not the number of a dead letter")
		return 0
	}
	return id
}

// change answers with what do returns, which changes something, if nothing is wrong with the request.
func change[V any](q *query, do func(ctx context.Context) (V, error)) (any, error) {
	if q.err != nil {
		return nil, q.err
	}
	return do(q.Context())
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

// questions are what the page reads, by path, with the answers of package view.
func (s *server) questions() map[string]func(q *query) (any, error) {
	v := s.view
	return map[string]func(q *query) (any, error){
		"runs":       func(q *query) (any, error) { return v.Runs(q.Context(), q.runList()) },
		"runs/{run}": func(q *query) (any, error) { return v.Progress(q.Context(), q.run(), nil) },
		// what a run was asked for and made with
		"runs/{run}/settings": func(q *query) (any, error) { return v.Settings(q.Context(), q.run()) },
		"runs/{run}/groups":   func(q *query) (any, error) { return v.Groups(q.Context(), q.run(), q.groupList()) },
		// the rewards over time, of one data source or of all
		"runs/{run}/curve": func(q *query) (any, error) {
			return v.Curve(q.Context(), q.run(), q.FormValue("data_source"), q.points())
		},
		"runs/{run}/updates": func(q *query) (any, error) { return v.Updates(q.Context(), q.run(), q.points()) },
		"runs/{run}/groups/{uid}": func(q *query) (any, error) {
			offset, limit := q.number("offset", 0, 0, schemas.MaxGroupSize), q.number("limit", 64, 1, maxPage)
			return v.Group(q.Context(), q.run(), q.uid(), offset, limit)
		},
		"runs/{run}/groups/{uid}/{sample}": func(q *query) (any, error) {
			index, stage := q.sample()
			return v.Sample(q.Context(), q.run(), q.uid(), index, stage)
		},
		"runs/{run}/verdicts": func(q *query) (any, error) { // the samples that wait for one
			waiting, err := v.Unjudged(q.Context(), q.run(), maxJudged)
			return map[string]any{"waiting": waiting}, err
		},
		"compare": func(q *query) (any, error) {
			a, b := token[schemas.Run](q, "a"), token[schemas.Run](q, "b")
			return v.Compare(q.Context(), a, b, q.number("offset", 0, 0, view.MaxRows))
		},
		"system": func(q *query) (any, error) { return v.System(q.Context()) },
		"lanes/{lane}": func(q *query) (any, error) {
			tenant := schemas.TenantMain
			if q.FormValue("tenant") != "" {
				tenant = token[schemas.Tenant](q, "tenant")
			}
			return v.Lane(q.Context(), token[schemas.Lane](q, "lane").Of(tenant), maxPage)
		},
		"dead":      s.answerDead,
		"dead/{id}": func(q *query) (any, error) { return v.Letter(q.Context(), q.letter()) },
		"doctor":    s.answerDoctor,
	}
}

// groupList reads which groups of a run a page has.
func (q *query) groupList() view.List {
	l := view.List{
		Order: cmp.Or(q.FormValue("order"), "newest"), Status: q.FormValue("status"), Text: q.FormValue("text"),
		Offset: q.number("offset", 0, 0, view.MaxRows), Limit: q.number("limit", 50, 1, maxPage),
	}
	if !slices.Contains(view.Orders, l.Order) {
		q.fault("order: %q; must be one of %v", l.Order, view.Orders)
	}
	return l
}

func (q *query) points() int { return q.number("points", 400, 1, 2000) }

// trajectoryOf returns the trajectory that a request is about.
func (s *server) trajectoryOf(q *query) (*schemas.Trajectory, error) {
	index, stage := q.sample()
	t, err := s.view.Trajectory(q.Context(), q.run(), q.uid(), index, stage)
	return t, cmp.Or(q.err, err)
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
	return s.view.Letters(q.Context(), run, before)
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
	t, err := s.trajectoryOf(&query{Request: r.WithContext(ctx), refuse: done})
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
