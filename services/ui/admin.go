package ui

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/outcomes"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
)

// pageMay is what a page may do, and what outcomes there are.
type pageMay struct {
	// MP4 says why there is no mp4 of videos; empty: there is.
	MP4      string            `json:"mp4,omitempty"`
	Admin    bool              `json:"admin"`
	Doctor   bool              `json:"doctor"`
	Tones    map[string]string `json:"tones"`
	Outcomes []string          `json:"outcomes"`
}

// answerPage answers with what the page may do. It needs no server of the pipeline.
func (s *server) answerPage(w http.ResponseWriter, _ *http.Request) {
	may := pageMay{
		Admin: s.cfg.Admin, Doctor: s.cfg.Doctor != nil, Tones: outcomes.Tones(), Outcomes: outcomes.GroupOutcomes(),
	}
	if _, err := media.FFmpeg(); err != nil {
		may.MP4 = err.Error()
	}
	data, _ := json.Marshal(may) // texts and flags always encode
	w.Header().Set("Content-Type", "application/json")
	s.write(w, data)
}

// answerDoctor answers with the findings of all checks, which pages share for a moment.
func (s *server) answerDoctor(q *query) (any, error) {
	if s.cfg.Doctor == nil {
		return nil, &requestError{http.StatusNotFound, "this page makes no checks; run 'meander doctor'"}
	}
	return s.findings.Get(q.Context())
}

// checked are the findings of all checks, and when they were made, Unix milliseconds.
type checked struct {
	Findings any   `json:"findings"`
	At       int64 `json:"at"`
}

// maxJudged is how many samples that wait for a verdict a page gets at once.
const maxJudged = 50

// verdict is what a person gives a sample on the page.
type verdict struct {
	Name  string   `json:"name"`
	Value *float64 `json:"value"`
}

// giveVerdict stores the verdict of a person. The first one of a sample and a name counts.
func (s *server) giveVerdict(q *query) (any, error) {
	t, err := s.trajectoryOf(q)
	if err != nil {
		return nil, err
	}
	index, _ := q.sample()
	if t.Run != schemas.Run(q.PathValue("run")) {
		return nil, badRequest("the sample is of another run, %s", t.Run)
	}
	var v verdict
	if err := json.NewDecoder(q.Body).Decode(&v); err != nil || v.Value == nil {
		return nil, badRequest("must be a name and a value")
	}
	if !slices.Contains(view.VerdictNames(&t.Group), v.Name) {
		return nil, badRequest("the sample waits for no verdict %q", v.Name)
	}
	event := &schemas.Verdict{
		Run: t.Run, UID: t.UID, SampleIndex: index, Name: v.Name, Value: v.Value, At: time.Now().UnixNano(),
	}
	status, err := view.ClosedAs(q.Context(), s.bus, event)
	if err != nil {
		return nil, err
	}
	if status != "" {
		return nil, &requestError{http.StatusConflict, "too late: the group has its result, " + status}
	}
	err = s.client.Verdict(q.Context(), event)
	if errors.Is(err, client.ErrJudged) {
		return nil, &requestError{http.StatusConflict, err.Error()}
	}
	return v, err
}

// setNotes stores the tags and the note of a run.
func (s *server) setNotes(q *query) (any, error) {
	run := q.run()
	var given bus.Notes
	d := json.NewDecoder(q.Body)
	d.DisallowUnknownFields()
	if err := d.Decode(&given); err != nil {
		q.fault("must be tags and a note")
	} else if err := given.Validate(); err != nil {
		q.fault("%v", err)
	}
	return change(q, func(ctx context.Context) (*bus.Notes, error) {
		if _, err := s.stored(ctx, run); err != nil {
			return nil, err
		}
		return s.bus.EditNotes(ctx, run, "the page", func(n *bus.Notes) { n.Tags, n.Note = given.Tags, given.Note })
	})
}

func (s *server) stored(ctx context.Context, run schemas.Run) (*view.Run, error) {
	runs, err := view.Count(ctx, s.bus, run)
	if err == nil && runs[run] == nil {
		err = client.ErrNotFound
	}
	return runs[run], err
}

// removeRun removes a run for ever, if its name is given again: with Open also its open groups. Images that nothing
// else names follow.
func (s *server) removeRun(q *query) (any, error) {
	run := q.run()
	var given struct {
		Name schemas.Run `json:"name"`
		Open bool        `json:"open"`
	}
	if err := json.NewDecoder(q.Body).Decode(&given); err != nil || given.Name != run {
		q.fault("name: %q; must be %s, the run that is to go", given.Name, run)
	}
	return change(q, func(ctx context.Context) (any, error) {
		r, err := s.stored(ctx, run)
		if err != nil {
			return nil, err
		}
		if r.Open > 0 && !given.Open {
			return nil, &requestError{http.StatusConflict, fmt.Sprintf(
				"%d groups are open: cancel the run first ('meander cancel %s'), or say that they go, too",
				r.Open, run)}
		}
		removed, err := s.bus.Purge(ctx, run)
		if err != nil {
			return nil, err
		}
		if !s.sweeping.Swap(true) {
			s.sweeps.Go(s.sweep)
		}
		return map[string]any{"events": removed}, nil
	})
}

func (s *server) sweep() {
	defer s.sweeping.Store(false)
	if _, err := s.bus.SweepBlobs(s.ctx, bus.BlobGrace, false); err != nil && s.ctx.Err() == nil {
		s.log.Warn().Err(err).Msg("blobs of a removed run are left: 'meander gc --blobs' removes them")
	}
}

// replayLetter publishes the original of a dead letter again, and removes the letter.
func (s *server) replayLetter(q *query) (any, error) {
	id := q.letter()
	return change(q, func(ctx context.Context) (any, error) {
		ack, subject, err := s.bus.Replay(ctx, id)
		return map[string]any{"subject": subject, "stream": ack.Stream, "sequence": ack.Seq}, err
	})
}

// dropLetter removes a dead letter.
func (s *server) dropLetter(q *query) (any, error) {
	id := q.letter()
	return change(q, func(ctx context.Context) (any, error) {
		if _, err := s.bus.Get(ctx, schemas.StreamDead, id); err != nil {
			return nil, err
		}
		return map[string]any{"dropped": id}, s.bus.Delete(ctx, schemas.StreamDead, id)
	})
}

// maxBody is how many bytes an action of the page may have, bodyTimeout how long a browser may take to send them.
const maxBody, bodyTimeout = 32 << 10, 10 * time.Second

// allows reports whether a request may change something: the page was started with Admin, and the request was made by
// the page itself, which no form of another site can do. It answers when the request may not.
func (s *server) allows(w http.ResponseWriter, r *http.Request) bool {
	switch {
	case r.Method != http.MethodPost || !s.cfg.Admin:
		w.Header().Set("Allow", "GET, HEAD")
		writeError(w, http.StatusMethodNotAllowed, "the page reads, and changes nothing; start it with --admin")
	case new(http.CrossOriginProtection).Check(r) != nil || r.Header.Get("Content-Type") != "application/json":
		writeError(w, http.StatusForbidden, "only the page itself may change something")
	default:
		return readBody(w, r)
	}
	return false
}

// readBody reads what an action says before the action takes a place among the questions, of which there are few. It
// answers when that fails.
func readBody(w http.ResponseWriter, r *http.Request) bool {
	c := http.NewResponseController(w)
	_ = c.SetReadDeadline(time.Now().Add(bodyTimeout)) // servers of net/http have deadlines
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		writeError(w, http.StatusBadRequest, fmt.Sprintf("the action cannot be read: %v", err))
		return false
	}
	_ = c.SetReadDeadline(time.Time{})
	r.Body = io.NopCloser(bytes.NewReader(body))
	return true
}
