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

	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
)

// maxPage is how many groups, samples or versions a page has.
const maxPage = 200

// badRequest returns an error that the client made.
func badRequest(format string, args ...any) error {
	return &requestError{http.StatusBadRequest, fmt.Sprintf(format, args...)}
}

// token reads a name of a request: of its path, or else of its query.
func token[T ~string](r *http.Request, name string) (T, error) {
	v := T(cmp.Or(r.PathValue(name), r.FormValue(name)))
	if err := schemas.CheckToken(name, v); err != nil {
		return "", badRequest("%v", err)
	}
	return v, nil
}

// number reads a number of a request's query that lies between least and most; absent: def.
func number(r *http.Request, name string, def, least, most int) (int, error) {
	text := r.FormValue(name)
	if text == "" {
		return def, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < least || n > most {
		return 0, badRequest("%s: %q; must be a number from %d to %d", name, text, least, most)
	}
	return n, nil
}

func (s *server) answerRuns(r *http.Request) (any, error) { return s.view.Runs(r.Context()) }

func (s *server) answerSystem(r *http.Request) (any, error) { return s.view.System(r.Context()) }

func (s *server) answerRun(r *http.Request) (any, error) {
	run, err := token[schemas.Run](r, "run")
	if err != nil {
		return nil, err
	}
	return s.view.Progress(r.Context(), run)
}

// answerGroups answers with a page of the groups of a run: offset, limit, order, status and text say which.
func (s *server) answerGroups(r *http.Request) (any, error) {
	run, err := token[schemas.Run](r, "run")
	if err != nil {
		return nil, err
	}
	l := view.List{
		Order: cmp.Or(r.FormValue("order"), "newest"), Status: r.FormValue("status"), Text: r.FormValue("text"),
	}
	if l.Offset, err = number(r, "offset", 0, 0, view.MaxRows); err != nil {
		return nil, err
	}
	if l.Limit, err = number(r, "limit", 50, 1, maxPage); err != nil {
		return nil, err
	}
	if !slices.Contains(view.Orders, l.Order) {
		return nil, badRequest("order: %q; must be one of %v", l.Order, view.Orders)
	}
	return s.view.Groups(r.Context(), run, l)
}

// answerCurve answers with the rewards of a run over time, of one data source or of all.
func (s *server) answerCurve(r *http.Request) (any, error) {
	run, err := token[schemas.Run](r, "run")
	if err != nil {
		return nil, err
	}
	most, err := number(r, "points", 400, 1, 2000)
	if err != nil {
		return nil, err
	}
	return s.view.Curve(r.Context(), run, r.FormValue("data_source"), most)
}

// answerGroup answers with a group and a page of its samples.
func (s *server) answerGroup(r *http.Request) (any, error) {
	run, uid, err := uidOf(r)
	if err != nil {
		return nil, err
	}
	offset, err := number(r, "offset", 0, 0, schemas.MaxGroupSize)
	if err != nil {
		return nil, err
	}
	limit, err := number(r, "limit", 64, 1, maxPage)
	if err != nil {
		return nil, err
	}
	return s.view.Group(r.Context(), run, uid, offset, limit)
}

// uidOf returns the run and the group that a request is about.
func uidOf(r *http.Request) (run schemas.Run, uid schemas.UID, err error) {
	if run, err = token[schemas.Run](r, "run"); err == nil {
		uid, err = token[schemas.UID](r, "uid")
	}
	return run, uid, err
}

// sampleOf returns the sample that a request is about.
func sampleOf(r *http.Request) (run schemas.Run, uid schemas.UID, index int64, err error) {
	if run, uid, err = uidOf(r); err != nil {
		return "", "", 0, err
	}
	index, err = strconv.ParseInt(r.PathValue("sample"), 10, 64)
	if err != nil || index < 0 || index >= schemas.MaxGroupSize {
		return "", "", 0, badRequest("that is not the index of a sample")
	}
	return run, uid, index, nil
}

func (s *server) answerSample(r *http.Request) (any, error) {
	run, uid, index, err := sampleOf(r)
	if err != nil {
		return nil, err
	}
	return s.view.Sample(r.Context(), run, uid, index)
}

// trajectoryOf returns the trajectory that a request is about.
func (s *server) trajectoryOf(r *http.Request) (*schemas.Trajectory, error) {
	run, uid, index, err := sampleOf(r)
	if err != nil {
		return nil, err
	}
	return s.view.Trajectory(r.Context(), run, uid, index)
}

// answerCompare answers with the groups that the runs a and b have in common.
func (s *server) answerCompare(r *http.Request) (any, error) {
	offset, err := number(r, "offset", 0, 0, view.MaxRows)
	if err != nil {
		return nil, err
	}
	a, err := token[schemas.Run](r, "a")
	if err != nil {
		return nil, err
	}
	b, err := token[schemas.Run](r, "b")
	if err != nil {
		return nil, err
	}
	return s.view.Compare(r.Context(), a, b, offset)
}

func (s *server) answerLane(r *http.Request) (any, error) {
	lane, err := token[schemas.Lane](r, "lane")
	if err != nil {
		return nil, err
	}
	return s.view.Lane(r.Context(), lane, maxPage)
}

// answerDead answers with dead letters of one run or of all, before the sequence before.
func (s *server) answerDead(r *http.Request) (any, error) {
	run, before := schemas.Run("*"), uint64(0)
	var err error
	if r.FormValue("run") != "" {
		if run, err = token[schemas.Run](r, "run"); err != nil {
			return nil, err
		}
	}
	if text := r.FormValue("before"); text != "" {
		if before, err = strconv.ParseUint(text, 10, 64); err != nil || before == 0 {
			return nil, badRequest("before: must be the number of a dead letter")
		}
	}
	return s.view.Letters(r.Context(), run, before)
}

// answerLetter answers with one dead letter and its original.
func (s *server) answerLetter(r *http.Request) (any, error) {
	id, err := letterID(r)
	if err != nil {
		return nil, err
	}
	return s.view.Letter(r.Context(), id)
}

// pngMagic is how a PNG file begins.
var pngMagic = []byte("\x89PNG\r\n\x1a\n")

// media answers with a file of a sample, or with one of its states.
func (s *server) media(w http.ResponseWriter, r *http.Request) {
	ctx, done := context.WithTimeout(r.Context(), readTimeout)
	defer done()
	release, err := s.admit(ctx)
	if err != nil {
		s.fail(w, r, err)
		return
	}
	defer release()
	t, err := s.trajectoryOf(r.WithContext(ctx))
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

// file returns a file of a sample, or an image of a state, and its content type.
func (s *server) file(ctx context.Context, t *schemas.Trajectory, kind string) (data []byte, as string, err error) {
	magic := pngMagic
	switch as = contentTypes[kind]; {
	case as != "":
		if data, err = s.client.Medium(ctx, t, kind); kind == schemas.KindAudio {
			magic = []byte("RIFF")
		}
	default:
		as = contentTypes[schemas.KindImage]
		index, numberErr := strconv.ParseInt(kind, 10, 64)
		if numberErr != nil || !slices.Contains(view.StatesOf(t), index) {
			return nil, "", &requestError{http.StatusNotFound, "this state is not stored"}
		}
		data, err = s.view.StateImage(ctx, t, index)
	}
	if err == nil && !bytes.HasPrefix(data, magic) {
		err = &requestError{http.StatusBadGateway, "what is stored as the " + kind + " is no PNG or WAV"}
	}
	return data, as, err
}
