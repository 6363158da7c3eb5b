// Package doctor checks a pipeline: its server and streams, what this credential may do, clocks, disk, model,
// devices, reward functions, and the services that run. It changes nothing. Run makes one check for each area; a
// check reports findings, and a check that could not be made is Unchecked, which is not ok. Each check ends within
// its timeout.
//
// An area is what one check is about. A check gets notes, to which it adds its findings: what it saw, and what to do
// about it. A question to the server that fails is a finding too.
//
// Checks report errors as findings; only askAll and examine return them.
package doctor

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/pkg/bus"
)

// State is the outcome of a check.
type State string

// The states of a finding. Unchecked: the check could not be made, and Says tells why.
const (
	OK        State = "ok"
	Warning   State = "warning"
	Fault     State = "fault"
	Unchecked State = "not checked"
)

// Finding is one outcome of a check.
type Finding struct {
	// Area is the part of the pipeline that was checked, such as streams.
	Area  string `json:"area"`
	State State  `json:"state"`
	// Says is what was found, in one line. Fix is what to do about it; empty when there is nothing to do.
	Says string `json:"says"`
	Fix  string `json:"fix,omitempty"`
}

// Options say what is checked.
type Options struct {
	// Bus is a connection to the server; nil: there is none, and NoServer says why. Where names the server in texts.
	Bus      *bus.Bus `key:"-"`
	NoServer error    `key:"-"`
	Where    string   `key:"-"`
	// Servers are the addresses (host:port) of a cluster's servers; each is dialled.
	Servers []string `key:"-"`
	// Empty says that there is no server because no store has been made yet.
	Empty bool `key:"-"`
	// Own says that this process opened the server itself, on a store that no other process serves.
	Own bool `key:"-"`
	// Certificate is the certificate of the server, where the connection does not show it; nil: it has none.
	Certificate *x509.Certificate `key:"-"`
	// DiskFree returns the free bytes of the server's disk; nil: it cannot be seen from this machine.
	DiskFree func() (int64, error) `key:"-"`
	// What of this machine is checked; empty: not checked. EngineKey is the token of the workers of Engine.
	Model     string        `key:"model" help:"model to check; default the one of the pipeline on the store, or of 'meander up'"`
	Device    string        `key:"device" help:"device to check; default as for --model"`
	Engine    string        `key:"engine" help:"torch or torch=ADDRESS where a worker computes the model; default as for --model"`
	EngineKey string        `key:"-"`
	Scorers   string        `key:"scorers" help:"YAML file of reward functions to check; default as for --model"`
	AllCounts bool          `key:"all_counts" help:"compare the counts of all runs with their events; default the newest three"`
	Timeout   time.Duration `key:"timeout" range:"(0.." help:"time limit of each check"`
	// Version is the version of this program.
	Version string `key:"-"`
	// Now is the clock of this machine; default time.Now.
	Now func() time.Time `key:"-"`
}

// DefaultTimeout is how long one check may wait for others.
const DefaultTimeout = 10 * time.Second

// busy is how many times as long what this machine computes may take: it may have other work. moreTime says what to do
// where that may be so.
const busy, moreTime = 10, "; if this machine or the server is only busy, give it more time: --timeout 1m"

// area is one check; it may have several findings.
type area struct {
	name string
	// server says that the check needs a server.
	server bool
	// computes says that it computes here, and may take busy times as long.
	computes bool
	check    func(ctx context.Context, o *Options, say *notes)
}

var areas = []area{
	{"server", true, false, checkServer},
	{"streams", true, false, checkStreams},
	{"consumers", true, false, checkConsumersTwice},
	{"permissions", true, false, checkPermissions},
	{"limits", true, false, checkLimits},
	{"clocks", true, false, checkClocks},
	{"services", true, false, checkServices},
	{"counts", true, false, checkCounts},
	{"policies", true, false, checkPolicies},
	{"disk", false, false, checkDisk},
	{"model", false, true, checkModelFolder},
	{"device", false, false, checkDevice},
	{"rewards", false, true, checkRewards},
}

// Run makes all checks side by side, and calls report with their findings in the order of the areas; 'meander doctor'
// prints them. Without a server only the checks of this machine run.
func Run(ctx context.Context, o Options, report func(Finding)) {
	if o.Timeout <= 0 {
		o.Timeout = DefaultTimeout
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	todo := areas
	if o.Bus == nil {
		todo = withoutServer()
	}
	found := make([]chan []Finding, len(todo))
	for i, a := range todo {
		found[i] = make(chan []Finding, 1)
		go func() { found[i] <- checkInTime(ctx, &o, a) }()
	}
	for _, c := range found {
		for _, f := range <-c {
			report(f)
		}
	}
}

// checkInTime makes the check of one area and gives up when it takes too long, which is a fault: a disk or a peer
// that hangs must not hang the program.
func checkInTime(ctx context.Context, o *Options, a area) []Finding {
	say := &notes{area: a.name}
	ctx, stop := context.WithTimeout(ctx, o.Timeout)
	defer stop()
	done := make(chan []Finding, 1)
	go func() {
		a.check(ctx, o, say)
		done <- say.found
	}()
	patience := o.Timeout + time.Second // a check that ends with ctx reports that itself
	if a.computes {
		patience = busy*o.Timeout + time.Second
	}
	grace := time.NewTimer(patience)
	defer grace.Stop()
	select {
	case f := <-done:
		return f
	case <-grace.C:
		late := &notes{area: a.name}
		late.add(Fault, "try again; what hangs is not this program"+moreTime, "no answer within %v", o.Timeout)
		return late.found
	}
}

// reportNoServer says why there is no server, and what to do; it stands for the check of the server then.
func reportNoServer(_ context.Context, o *Options, say *notes) {
	verification, _ := errors.AsType[*tls.CertificateVerificationError](o.NoServer)
	invalid, _ := errors.AsType[x509.CertificateInvalidError](o.NoServer)
	switch {
	case verification != nil && invalid.Reason == x509.Expired && invalid.Cert != nil:
		say.add(Fault, renewCertificate+"; if that is right, set the clock of this machine", "%v", o.NoServer)
	case verification != nil:
		say.add(Fault, "the server runs, but this program does not trust its certificate: name its authority with "+
			"--nats-tls-ca, or connect by a name that is in the certificate", "%v", o.NoServer)
	case o.Empty:
		say.add(Unchecked, "start one with 'meander up', or name one with --nats", "%v", o.NoServer)
	case errors.Is(o.NoServer, nats.ErrAuthorization):
		say.add(Fault, "give the credentials or the token of a user that it knows: --nats-creds, MEANDER_NATS_TOKEN",
			"%v", o.NoServer)
	default:
		say.add(Fault, "start it ('meander up', or nats-server -js), or name another with --nats", "%v", o.NoServer)
	}
}

// renewCertificate says what to do about a certificate that ends.
const renewCertificate = "make a new certificate ('meander auth update DIR' for one of meander), and start the " +
	"server again"

// withoutServer returns what is checked where there is no server: the areas of this machine. Of the others it is said
// why not.
func withoutServer() []area {
	var asked []string
	todo := []area{{"server", false, false, reportNoServer}, {}}
	for _, a := range areas[1:] {
		if a.server {
			asked = append(asked, a.name)
		} else {
			todo = append(todo, a)
		}
	}
	todo[1] = area{strings.Join(asked, ", "), false, false, func(_ context.Context, _ *Options, say *notes) {
		say.add(Unchecked, "", "there is no server to ask")
	}}
	return todo
}

// askAdmin says who sees what this credential does not.
const askAdmin = "use a credential that may, such as the admin's"

// notes collects the findings of an area.
type notes struct {
	area  string
	found []Finding
}

// add notes a finding: its state, what to do about it ("" for nothing), and what was found.
func (n *notes) add(s State, fix, format string, args ...any) {
	n.found = append(n.found, Finding{Area: n.area, State: s, Says: fmt.Sprintf(format, args...), Fix: fix})
}

func (n *notes) ok(format string, args ...any) { n.add(OK, "", format, args...) }

// addFailure adds the finding that a question to the server, what, has failed. A server that cannot be reached is a
// fault; what this credential may not ask stays unchecked.
func (n *notes) addFailure(what string, err error) {
	const codeNotAvailable = 10008 // of a server whose cluster has no leader
	api, _ := errors.AsType[*jetstream.APIError](err)
	switch {
	case errors.Is(err, bus.ErrPermission):
		n.add(Unchecked, askAdmin, "%s: this credential may not ask", what)
	case errors.Is(err, bus.ErrNoLeader), api != nil && api.ErrorCode == codeNotAvailable:
		n.add(Fault, "start the servers that are down: with less than a majority of them the streams take and give "+
			"nothing", "%s: no leader; its servers elect one, or too few of them are up", what)
	case errors.Is(err, bus.ErrNoJetStream):
		n.add(Fault, "start the server with -js; if it has that, see its log", "%s: the server has no JetStream for "+
			"this user", what)
	case errors.Is(err, context.DeadlineExceeded):
		n.add(Fault, "see the server's log"+moreTime, "%s: no answer in time", what)
	default:
		n.add(Fault, "see the server's log", "%s: %v", what, err)
	}
}
