package doctor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/micro"

	"github.com/meander-rl/meander/pkg/auth"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/boot"
	"github.com/meander-rl/meander/services/internal/present"
)

const (
	// gather is how long a question to all services waits for answers.
	gather = time.Second
	// Clocks that are skewed apart are a warning, wrong apart a fault: clients set the deadlines of prompts by
	// their clock, and the server's clock judges them.
	skewed, wrong = 2 * time.Second, 30 * time.Second
)

// stages are the services without which no prompt gets its result.
var stages = []string{"intake", "sampler", "reward", "advantage"}

// checkPermissions reports what this credential may do, and warns of a server that lets every client do everything.
func checkPermissions(ctx context.Context, o *Options, say *notes) {
	nc := o.Bus.Conn()
	m, err := nc.RequestWithContext(ctx, "$SYS.REQ.USER.INFO", nil)
	if err != nil {
		say.add(Unchecked, "", "the server does not tell this credential what it may do")
		return
	}
	var info struct {
		Data struct {
			User        string `json:"user"`
			Account     string `json:"account"`
			Permissions *struct {
				Publish   *grants `json:"publish"`
				Subscribe *grants `json:"subscribe"`
			} `json:"permissions"`
		} `json:"data"`
	}
	if err := json.Unmarshal(m.Data, &info); err != nil {
		say.addFailure("permissions", err)
		return
	}
	p := info.Data.Permissions
	if p == nil || p.Publish == nil && p.Subscribe == nil {
		switch {
		case o.Own || nc.AuthRequired():
			say.ok("everything")
		case remote(o):
			say.add(Warning, "give the server a token or users",
				"everything, and so may all clients that reach the server: it asks for no credential")
		default:
			say.ok("everything; the server asks for no credential, and was reached on this machine")
		}
		return
	}
	var allowed, denied []string
	for _, of := range []struct{ what, subject string }{
		{"publish prompts", schemas.PromptSubject("doctor")},
		{"control runs", schemas.ControlSubject("doctor")},
		{"give verdicts", schemas.VerdictSubject("doctor", "doctor", 0, "external")},
		{"store trajectories", schemas.TrajectorySubject("doctor", "doctor", 0, schemas.StageMain)},
		{"store rewards", schemas.RewardSubject("doctor", "doctor", "doctor", 0)},
		{"store results", schemas.AdvantageSubject("doctor", "doctor")},
		{"set streams up", "$JS.API.STREAM.CREATE." + schemas.StreamSteps},
		{"remove events", "$JS.API.STREAM.PURGE." + schemas.StreamSteps},
		{"read results", "$JS.API.DIRECT.GET." + schemas.StreamAdvantages},
	} {
		if p.Publish.allow(of.subject) {
			allowed = append(allowed, of.what)
		} else {
			denied = append(denied, of.what)
		}
	}
	who := "this credential"
	if info.Data.User != "" {
		who = fmt.Sprintf("user %.16s", info.Data.User)
	}
	if len(allowed) > 0 {
		say.ok("%s may %s", who, strings.Join(allowed, ", "))
	}
	if len(denied) > 0 {
		say.ok("and may not %s", strings.Join(denied, ", "))
	}
}

// grants are permissions, as the server describes them.
type grants struct {
	Allow []string `json:"allow"`
	Deny  []string `json:"deny"`
}

// allow reports whether a subject may be published on, by the lists that the server gave. Without an allow list every
// subject may, unless it is denied.
func (g *grants) allow(subject string) bool {
	if g == nil {
		return true
	}
	in := func(list []string) bool {
		return slices.ContainsFunc(list, func(p string) bool { return matches(p, subject) })
	}
	return (len(g.Allow) == 0 || in(g.Allow)) && !in(g.Deny)
}

// matches reports whether a pattern of subjects, with or without wildcards, covers a subject without wildcards.
func matches(pattern, subject string) bool {
	p, s := strings.Split(pattern, "."), strings.Split(subject, ".")
	for i, token := range p {
		switch {
		case token == ">":
			return len(s) > i
		case i >= len(s) || token != "*" && token != s[i]:
			return false
		}
	}
	return len(p) == len(s)
}

// checkClocks checks how far the clocks of this machine and of the services are from the server's.
func checkClocks(ctx context.Context, o *Options, say *notes) {
	began := o.Now()
	info, err := o.Bus.StreamInfo(ctx, schemas.StreamPresenceBucket)
	if err == nil && info.TimeStamp.IsZero() {
		err = errors.New("it did not say the time")
	}
	if err != nil {
		say.addFailure("the server's clock", err)
		return
	}
	took := o.Now().Sub(began)
	behind := info.TimeStamp.Sub(began.Add(took / 2))
	reportClock("this machine", behind, say)
	entries, err := o.Bus.LastMany(ctx, schemas.StreamPresenceBucket, []string{schemas.PresenceSubject(">")})
	if err != nil {
		say.addFailure("the clocks of services", err)
		return
	}
	var told []string
	for _, m := range entries {
		p := &schemas.Presence{}
		if len(m.Data) == 0 || schemas.DecodeValid(m.Data, p) != nil {
			continue
		}
		told = append(told, p.Service)
		reportClock(p.Instance, m.Time.Sub(time.Unix(0, p.At)), say)
	}
	// Services without a presence entry are asked directly.
	began = o.Now()
	err = askAll(ctx, o.Bus.Conn(), auth.ClockSubject, func(m *nats.Msg) {
		var c boot.Clock
		if json.Unmarshal(m.Data, &c) == nil && c.At > 0 && !slices.Contains(told, c.Service) {
			half := o.Now().Sub(began) / 2
			reportClock(c.Service+" "+c.Instance, behind+began.Add(half).Sub(time.Unix(0, c.At)), say)
		}
	})
	if err != nil {
		say.addFailure("the clocks of services", err)
	}
}

// reportClock reports how far a clock, that of whose, is behind (or, negative, ahead of) the server's: a fault or a
// warning if that is far.
func reportClock(whose string, behind time.Duration, say *notes) {
	way := "behind"
	if behind < 0 {
		way = "ahead of"
	}
	var state State
	switch d := behind.Abs(); {
	case d >= wrong:
		state = Fault
	case d >= skewed:
		state = Warning
	default:
		say.ok("%s: within %v of the server", whose, max(d, time.Millisecond).Round(time.Millisecond))
		return
	}
	say.add(state, "set that clock by NTP: deadlines are moments", "%s: its clock is %v %s the server's", whose,
		behind.Abs().Round(100*time.Millisecond), way)
}

// checkServices checks which programs run, by the server's service discovery, whether their versions match, and
// whether requests wait for a sampler that is not there.
func checkServices(ctx context.Context, o *Options, say *notes) {
	found, err := discover(ctx, o.Bus.Conn())
	if err != nil {
		say.addFailure("services", err)
		return
	}
	versions, counts := map[string][]string{}, map[string]int{}
	for _, s := range found {
		name := strings.TrimPrefix(s.Name, "meander-")
		if s.Metadata["instance"] == "" { // a worker in another language, which has versions of its own
			continue
		}
		counts[name]++
		versions[s.Metadata["version"]] = append(versions[s.Metadata["version"]], name+" "+s.Metadata["instance"])
	}
	if denied := o.Bus.Denied(); len(found) == 0 && denied != nil && strings.Contains(denied.Error(), "$SRV") {
		say.addFailure("which services run", denied)
		return
	}
	var run, lack []string
	for _, stage := range stages {
		if counts[stage] == 0 {
			lack = append(lack, stage)
		} else {
			run = append(run, fmt.Sprintf("%d %s", counts[stage], stage))
		}
	}
	if len(run) > 0 {
		say.ok("running: %s", strings.Join(run, ", "))
	}
	switch {
	case len(lack) == 0:
	case o.Own:
		say.add(Unchecked, "start it with 'meander up'", "no process serves this store now")
	default:
		say.add(Warning, "start 'meander up', or the programs meander-"+strings.Join(lack, " meander-"),
			"no service answers for %s: what needs it waits", strings.Join(lack, ", "))
	}
	if _, same := versions[o.Version]; len(versions) > 1 || len(versions) == 1 && !same {
		var each []string
		for _, v := range slices.Sorted(maps.Keys(versions)) {
			each = append(each, fmt.Sprintf("%s: %s", v, strings.Join(versions[v], ", ")))
		}
		say.add(Warning, "run one version everywhere: bits are those of a build",
			"versions differ: this program is %s; %s", o.Version, strings.Join(each, "; "))
	}
	served := checkPresent(ctx, o, say)
	if served == nil {
		return
	}
	policies, err := o.Bus.Policies(ctx)
	if err != nil {
		say.addFailure("lanes", err)
		return
	}
	for _, p := range policies {
		if served[p.Lane] || p.Tenant != schemas.TenantMain {
			continue
		}
		if n, err := o.Bus.LaneBacklog(ctx, p.Lane); err == nil && n > 0 && !o.Own {
			say.add(Fault, fmt.Sprintf("start a sampler with --model %s", p.Model),
				"%d requests wait for a sampler of %q, and none runs", n, p.Lane)
		}
	}
}

// checkPresent checks what samplers and reward services say of themselves, and returns the lanes that are served; nil:
// the server did not say.
func checkPresent(ctx context.Context, o *Options, say *notes) map[schemas.Lane]bool {
	present, err := o.Bus.Present(ctx)
	if err != nil {
		say.addFailure("lanes", err)
		return nil
	}
	served := map[schemas.Lane]bool{}
	for _, p := range present {
		if p.Service == schemas.ServiceStarting {
			say.add(Warning, "start what it waits for, or change --engine", "%s of lane %s is not up: %s", p.Instance,
				p.Lane, p.Waiting)
			continue
		}
		if p.Service == schemas.ServiceReward && p.Waiting != "" {
			say.add(Warning, "start its workers or its server", "%s waits, or did when it asked last: %s", p.Instance,
				p.Waiting)
		}
		served[p.Lane] = true
		if p.Waiting != "" && p.Service != schemas.ServiceReward {
			say.add(Warning, "see its log; it goes on by itself", "%s of lane %s makes no samples now: %s", p.Instance,
				p.Lane, p.Waiting)
		}
		for _, m := range p.Missing {
			say.add(OK, "", "%s is without %s: %s", p.Instance, m.Name, m.Reason)
		}
	}
	return served
}

// discover returns the meander programs that answer the server's service discovery.
func discover(ctx context.Context, nc *nats.Conn) (out []micro.Info, err error) {
	err = askAll(ctx, nc, "$SRV.INFO", func(m *nats.Msg) {
		var info micro.Info
		if json.Unmarshal(m.Data, &info) == nil && strings.HasPrefix(info.Name, "meander-") {
			out = append(out, info)
		}
	})
	return out, err
}

// askAll sends a question to all subscribers of the subject, and calls answer for each answer that comes in time;
// none is no error. An error is of the connection or of ctx.
func askAll(ctx context.Context, nc *nats.Conn, subject string, answer func(*nats.Msg)) error {
	inbox := nc.NewInbox()
	answers, err := nc.SubscribeSync(inbox)
	if err != nil {
		return err
	}
	defer func() { _ = answers.Unsubscribe() }()
	if err := nc.PublishRequest(subject, inbox, nil); err != nil {
		return err
	}
	ctx, stop := context.WithTimeout(ctx, gather)
	defer stop()
	for {
		m, err := answers.NextMsgWithContext(ctx)
		switch {
		case errors.Is(err, context.DeadlineExceeded), errors.Is(err, nats.ErrNoResponders):
			return nil
		case err != nil:
			return err
		}
		answer(m)
	}
}

// checkPolicies checks the weights of each lane, and whether the running samplers use them. A lane is the request
// queue of a model.
func checkPolicies(ctx context.Context, o *Options, say *notes) {
	lanes, err := o.Bus.Policies(ctx)
	if err != nil {
		say.addFailure("policies", err)
		return
	}
	running, err := o.Bus.Present(ctx)
	if err != nil {
		say.addFailure("samplers", err)
		return
	}
	for _, p := range lanes {
		answers, err := o.Bus.Applied(ctx, p.Lineage())
		if err != nil {
			say.addFailure(fmt.Sprintf("answers to policies of lane %s", p.Lineage()), err)
			continue
		}
		checkLane(p, running, answers, say)
	}
	if len(lanes) == 0 {
		say.add(Unchecked, "", "there are none yet: samplers announce their weights when they start")
	}
}

// checkLane reports which samplers of a lane use its current policy p. running are all services that run, answers what
// the samplers said to policies.
func checkLane(p *schemas.Policy, running []*schemas.Presence, answers []*schemas.Applied, say *notes) {
	slices.Reverse(answers) // the newest first
	samplers, current := 0, 0
	for _, s := range running {
		if s.Service != schemas.ServiceSampler || s.Lane != p.Lane || s.Draining {
			continue
		}
		samplers++
		serving := s.Serving(p.Tenant)
		i := slices.IndexFunc(answers, func(a *schemas.Applied) bool {
			return a.Instance == s.Instance && a.PolicyVersion == p.PolicyVersion
		})
		switch {
		case i >= 0 && answers[i].State == schemas.AppliedRefused:
			why, _, _ := strings.Cut(answers[i].Error, "\n")
			goesOn := answers[i].Serving
			say.add(Fault, fmt.Sprintf("push weights that it takes, or go back: meander policy rollback %d", goesOn),
				"%s refused version %d of lane %s and goes on with %d: %s", s.Instance, p.PolicyVersion, p.Lineage(),
				goesOn, why)
		case serving.PolicyVersion == nil || *serving.PolicyVersion == p.PolicyVersion:
			current++
		case serving.Loading != nil:
			current++
			say.ok("%s takes over version %d of lane %s", s.Instance, *serving.Loading, p.Lineage())
		default:
			say.add(Warning, "see its log: it has not answered to that version",
				"%s uses version %d of lane %s, and the current one is %d", s.Instance, *serving.PolicyVersion,
				p.Lineage(), p.PolicyVersion)
		}
	}
	switch {
	case samplers == 0:
		say.ok("lane %s: version %d, and no sampler runs", p.Lineage(), p.PolicyVersion)
	case current == samplers:
		say.ok("lane %s: version %d, used by %s", p.Lineage(), p.PolicyVersion, present.Count(samplers, "sampler"))
	}
}
