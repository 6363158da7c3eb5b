// Package doctor looks a pipeline over: its server and streams, what this credential may do, clocks,
// disk, model, devices, reward functions, and the services that run. It changes nothing, and no
// check waits longer than it is given: what could not be looked at is said to be so, and is not ok.
package doctor

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/pkg/bus"
)

// State is what a check came to.
type State string

// The states of a finding. Unchecked is not ok: the check could not be made, and Says tells why.
const (
	OK        State = "ok"
	Warning   State = "warning"
	Fault     State = "fault"
	Unchecked State = "not checked"
)

// Finding is what one check found.
type Finding struct {
	// Area is what the check belongs to, such as streams.
	Area  string `json:"area"`
	State State  `json:"state"`
	// Says is what was found, in a line, and Fix what to do about it; empty when there is nothing to do.
	Says string `json:"says"`
	Fix  string `json:"fix,omitempty"`
}

// Options say what is looked at.
type Options struct {
	// Bus is a connection to the server; nil: there is none, and NoServer says why. Where names the
	// server for people.
	Bus      *bus.Bus
	NoServer error
	Where    string
	// Servers are the addresses (host:port) that the servers of a cluster were named by: each is tried.
	Servers []string
	// Empty says that there is no server because nothing has been made yet.
	Empty bool
	// Own says that the server is one that this process opened on a store which nobody serves.
	Own bool
	// DiskFree is the bytes that the disk of the server has left; nil: nobody here can see it.
	DiskFree func() (int64, error)
	// Model, Device and Scorers are those of the samplers and reward services on this machine; empty: not
	// looked at. Scorers is a file.
	Model, Device, Scorers string
	// Version is that of this program.
	Version string
	// Timeout bounds each check; default DefaultTimeout.
	Timeout time.Duration
	// Now is the clock of this machine; default time.Now.
	Now func() time.Time
}

// DefaultTimeout is how long one check may take.
const DefaultTimeout = 10 * time.Second

// area is one check, with what it may come to: several findings.
type area struct {
	name string
	// server says that it needs one.
	server bool
	look   func(ctx context.Context, o *Options, say *notes)
}

var areas = []area{
	{"server", true, server},
	{"streams", true, streams},
	{"consumers", true, consumers},
	{"permissions", true, permissions},
	{"limits", true, limits},
	{"clocks", true, clocks},
	{"services", true, services},
	{"policies", true, policies},
	{"disk", false, disk},
	{"model", false, modelFolder},
	{"device", false, device},
	{"rewards", false, rewards},
}

// Run makes all checks, side by side, and reports what they find in the order of the areas.
func Run(ctx context.Context, o Options, report func(Finding)) {
	if o.Timeout <= 0 {
		o.Timeout = DefaultTimeout
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	look := areas
	if o.Bus == nil {
		look = append([]area{{"server", false, absent}, {without(), false, unasked}}, local()...)
	}
	found := make([]chan []Finding, len(look))
	for i, a := range look {
		found[i] = make(chan []Finding, 1)
		go func() { found[i] <- bounded(ctx, &o, a) }()
	}
	for _, c := range found {
		for _, f := range <-c {
			report(f)
		}
	}
}

// bounded is one check, given up when it takes too long: a disk or a peer that hangs must not hang us.
func bounded(ctx context.Context, o *Options, a area) []Finding {
	say := &notes{area: a.name}
	ctx, stop := context.WithTimeout(ctx, o.Timeout)
	defer stop()
	done := make(chan []Finding, 1)
	go func() {
		a.look(ctx, o, say)
		done <- say.found
	}()
	grace := time.NewTimer(o.Timeout + time.Second) // for what ends with ctx, and says so itself
	defer grace.Stop()
	select {
	case f := <-done:
		return f
	case <-grace.C:
		late := &notes{area: a.name}
		late.add(Fault, "try again; what hangs is not this program", "no answer within %v", o.Timeout)
		return late.found
	}
}

// absent says why there is no server.
func absent(_ context.Context, o *Options, say *notes) {
	switch {
	case o.Empty:
		say.add(Unchecked, "start one with 'meander up', or name one with --nats", "%v", o.NoServer)
	case errors.Is(o.NoServer, nats.ErrAuthorization):
		say.add(Fault, "give the credentials or the token of a user that it knows: --nats-creds, MEANDER_NATS_TOKEN", "%v", o.NoServer)
	default:
		say.add(Fault, "start it ('meander up', or nats-server -js), or name another with --nats", "%v", o.NoServer)
	}
}

// without names the areas that need a server, local has the others.
func without() string {
	var names []string
	for _, a := range areas[1:] {
		if a.server {
			names = append(names, a.name)
		}
	}
	return strings.Join(names, ", ")
}

func unasked(_ context.Context, _ *Options, say *notes) {
	say.add(Unchecked, "", "there is no server to ask")
}

func local() (out []area) {
	for _, a := range areas {
		if !a.server {
			out = append(out, a)
		}
	}
	return out
}

// notes collects the findings of an area.
type notes struct {
	area  string
	found []Finding
}

func (n *notes) add(s State, fix, format string, args ...any) {
	n.found = append(n.found, Finding{Area: n.area, State: s, Says: fmt.Sprintf(format, args...), Fix: fix})
}

func (n *notes) ok(format string, args ...any) { n.add(OK, "", format, args...) }

// failed says that a question was not answered: what cannot be reached is a fault, and what this credential
// may not ask about is not known.
func (n *notes) failed(what string, err error) {
	const codeNotAvailable = 10008 // of a server whose cluster has no leader
	api, _ := errors.AsType[*jetstream.APIError](err)
	switch {
	case errors.Is(err, bus.ErrPermission):
		n.add(Unchecked, "use a credential that may, such as the admin's", "%s: this credential may not ask", what)
	case errors.Is(err, bus.ErrNoLeader), api != nil && api.ErrorCode == codeNotAvailable:
		n.add(Fault, "start the servers that are down: with less than a majority of them the streams take and give nothing",
			"%s: no leader; its servers elect one, or too few of them are up", what)
	case errors.Is(err, context.DeadlineExceeded):
		n.add(Fault, "see the server's log", "%s: no answer in time", what)
	default:
		n.add(Fault, "see the server's log", "%s: %v", what, err)
	}
}
