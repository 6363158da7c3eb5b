package ui

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/meander-rl/meander/schemas"
)

const (
	// everyEvents is the least time between two bundles of events to a page, everySystem between two looks at what is
	// not followed.
	everyEvents, everySystem = 300 * time.Millisecond, 2 * time.Second
	// maxBundle is how many changed groups one event has.
	maxBundle = 200
)

// follow answers with server-sent events, until the page goes or the server ends. With run they are those of a run,
// from the revision since (or Last-Event-ID) on: its id is EPOCH-REVISION, and a reset says that another epoch has
// begun, so that the page must read all again. Otherwise they are the list of runs. health says whether the server of
// the pipeline answers.
func (s *server) follow(w http.ResponseWriter, r *http.Request) {
	select {
	case s.streams <- struct{}{}:
		defer func() { <-s.streams }()
	default:
		w.Header().Set("Retry-After", "10")
		writeError(w, http.StatusServiceUnavailable, fmt.Sprintf("%d pages follow already", maxStreams))
		return
	}
	var run schemas.Run
	if run = schemas.Run(r.FormValue("run")); run != "" {
		if err := schemas.CheckToken("run", run); err != nil {
			writeError(w, http.StatusBadRequest, err.Error())
			return
		}
	}
	p := &stream{server: s, w: w, out: http.NewResponseController(w), sent: map[string][]byte{}}
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-store")
	since := r.Header.Get("Last-Event-ID")
	if since == "" {
		since = r.FormValue("since")
	}
	if p.write("retry: 2000\n\n") != nil {
		return
	}
	if run == "" {
		p.sendList(r.Context(), r.FormValue("topic"))
		return
	}
	p.sendRun(r.Context(), run, since)
}

// stream is one page that follows.
type stream struct {
	*server
	w   http.ResponseWriter
	out *http.ResponseController
	// sent is the last event of each name, which is not sent twice in a row.
	sent map[string][]byte
}

// write sends text at once.
func (p *stream) write(text string) error {
	_ = p.out.SetWriteDeadline(time.Now().Add(writeTimeout))
	if _, err := p.w.Write([]byte(text)); err != nil {
		return err
	}
	return p.out.Flush()
}

// send sends an event, unless the last of its name was the same.
func (p *stream) send(name, id string, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if bytes.Equal(p.sent[name], data) {
		return nil
	}
	p.sent[name] = data
	if id != "" {
		id = "id: " + id + "\n"
	}
	return p.write("event: " + name + "\n" + id + "data: " + string(data) + "\n\n")
}

// sendHealth says whether the server of the pipeline answers; err is what the last question to it ended with.
func (p *stream) sendHealth(err error) error {
	says := ""
	switch {
	case !p.bus.Conn().IsConnected():
		says = "the connection to the pipeline's server is lost; it is tried again"
	case err != nil:
		says = err.Error()
	}
	return p.send("health", "", map[string]string{"fault": says, "where": p.cfg.Where})
}

// beat keeps a silent connection open.
func (p *stream) beat(last *time.Time) error {
	if time.Since(*last) < 15*time.Second {
		return nil
	}
	*last = time.Now()
	return p.write(": beat\n\n")
}

// sendList sends the list of runs, or with the topic system what runs, whenever it has changed.
func (p *stream) sendList(ctx context.Context, topic string) {
	last := time.Now()
	tick := time.NewTicker(everySystem)
	defer tick.Stop()
	for {
		var v any
		read, done := context.WithTimeout(ctx, readTimeout)
		v, err := p.listRuns(read)
		if topic == "system" && err == nil {
			v, err = p.system.get(read)
		}
		done()
		if ctx.Err() != nil || p.sendHealth(err) != nil || p.beat(&last) != nil {
			return
		}
		if err == nil {
			name := "runs"
			if topic == "system" {
				name = "system"
			}
			if p.send(name, "", v) != nil {
				return
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// sendRun sends the changed groups of a run, and how far it is.
func (p *stream) sendRun(ctx context.Context, run schemas.Run, since string) {
	last := time.Now()
	var f *follower
	var revision uint64
	looked := time.Time{}
	for {
		f2, err := p.followerOf(ctx, run)
		if ctx.Err() != nil {
			return
		}
		if err == nil && f2 != f { // the first one, or a fresh one
			f = f2
			epoch, text, _ := strings.Cut(since, "-")
			n, bad := strconv.ParseUint(text, 10, 64)
			if revision = n; epoch != f.epoch || bad != nil {
				f.mu.Lock()
				revision = f.revision
				f.mu.Unlock()
				if since != "" && p.send("reset", "", map[string]string{"epoch": f.epoch}) != nil {
					return
				}
			}
			since = "another-0"
		}
		wake := (<-chan struct{})(nil)
		if f != nil {
			f.mu.Lock()
			wake = f.changed
			f.mu.Unlock()
			for {
				rows, to := f.since(revision, maxBundle)
				if len(rows) == 0 {
					break
				}
				revision = to
				if p.send("groups", fmt.Sprintf("%s-%d", f.epoch, revision), map[string]any{"rows": rows}) != nil {
					return
				}
			}
			if err == nil && time.Since(looked) >= refresh {
				looked = time.Now()
				read, done := context.WithTimeout(ctx, readTimeout)
				var x *progress
				if x, err = p.describe(read, f); err == nil {
					if p.send("run", "", x) != nil {
						done()
						return
					}
				}
				done()
			}
		}
		if ctx.Err() != nil || p.sendHealth(err) != nil || p.beat(&last) != nil {
			return
		}
		if !waitFor(ctx, everyEvents) {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-wake:
		case <-time.After(everySystem):
		}
	}
}

// waitFor waits for a time; false: ctx has ended.
func waitFor(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}
