package ui

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
)

// everyEvents is the least time between two bundles of events to a page, everySystem between two looks at what is not
// followed.
const everyEvents, everySystem = 300 * time.Millisecond, 2 * time.Second

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
	asked := &query{Request: r, refuse: func() {}}
	list := asked.runList()
	if asked.err != nil {
		writeError(w, http.StatusBadRequest, asked.err.Error())
		return
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
		p.sendList(r.Context(), r.FormValue("topic"), list)
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

// healthTimeout bounds the questions of a stream of events, so that it soon says what is wrong.
const healthTimeout = 5 * time.Second

// sendHealth says whether the server of the pipeline answers, and how many dead letters it has; err is what the last
// question to it ended with.
func (p *stream) sendHealth(err error) error {
	says := ""
	switch {
	case !p.bus.Conn().IsConnected():
		says = p.lost().says
	case err != nil:
		says = err.Error()
	}
	x := map[string]any{"fault": says, "where": p.cfg.Where}
	if dead, known := p.view.Dead(); known {
		x["dead"] = dead
	}
	return p.send("health", "", x)
}

func (p *stream) beat(last *time.Time) error {
	if time.Since(*last) < 15*time.Second {
		return nil
	}
	*last = time.Now()
	return p.write(": beat\n\n")
}

// sendList sends the list of runs, or with the topic system what runs, whenever it has changed.
func (p *stream) sendList(ctx context.Context, topic string, list view.RunList) {
	last := time.Now()
	tick := time.NewTicker(everySystem)
	defer tick.Stop()
	for {
		err := p.sendListOnce(ctx, topic, list)
		if ctx.Err() != nil || p.sendHealth(err) != nil || p.beat(&last) != nil {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// ask calls read, which asks the server of the pipeline, with a bound in number and time.
func (p *stream) ask(ctx context.Context, read func(context.Context) error) error {
	release, err := p.admit(ctx)
	if err != nil {
		return err
	}
	defer release()
	ctx, done := context.WithTimeout(ctx, healthTimeout)
	defer done()
	return read(ctx)
}

// sendListOnce sends the list of runs, or what runs. It fails if the server of the pipeline cannot be read; that the
// browser has gone is found by what is sent next.
func (p *stream) sendListOnce(ctx context.Context, topic string, list view.RunList) error {
	return p.ask(ctx, func(ctx context.Context) (err error) {
		var v any
		name := "runs"
		if topic == "system" {
			name = topic
			v, err = p.view.System(ctx)
		} else {
			v, err = p.view.Runs(ctx, list)
		}
		if err == nil {
			_ = p.send(name, "", v)
		}
		return err
	})
}

// sendRun sends the changed groups of a run, and how far it is, until ctx ends or the browser has gone.
func (p *stream) sendRun(ctx context.Context, run schemas.Run, since string) {
	last, following := time.Now(), p.view.Follow(run, since)
	for ctx.Err() == nil {
		changes, err := following.Next(ctx)
		for _, c := range changes {
			var gone error
			switch {
			case c.Reset != "":
				gone = p.send("reset", "", map[string]string{"epoch": c.Reset})
			case c.Progress != nil:
				gone = p.send("run", "", c.Progress)
			default:
				gone = p.send("groups", c.ID, map[string]any{"rows": c.Rows})
			}
			if gone != nil {
				return
			}
		}
		if ctx.Err() != nil || p.sendHealth(err) != nil || p.beat(&last) != nil {
			return
		}
		select {
		case <-ctx.Done():
		case <-time.After(everyEvents):
			following.Wait(ctx, everySystem)
		}
	}
}
