package view

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/outcomes"
	"github.com/meander-rl/meander/schemas"
)

// Progress returns how far a run is, and what it waits for, or what ended it. Its status may be known; nil: it is not.
func (r *Reader) Progress(ctx context.Context, run schemas.Run, known *schemas.RunStatus) (*Progress, error) {
	f, err := r.follow(ctx, run, known)
	if err != nil {
		return nil, err
	}
	status, err := f.status.Get(ctx)
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	p := f.tally()
	f.mu.Unlock()
	system := &System{}
	if !outcomes.HasEnded(status.State) || p.Statuses[outcomes.Open] > 0 { // else nothing holds it up
		if system, err = r.system.Get(ctx); err != nil {
			return nil, err
		}
	}
	f.explain(p, status, system)
	return p, nil
}

// Waits returns what a run of this status waits for, or what ended it; not nil.
func (r *Reader) Waits(ctx context.Context, run schemas.Run, status *schemas.RunStatus) ([]outcomes.Wait, error) {
	if r.isPlain(ctx, run, status) {
		return []outcomes.Wait{}, nil
	}
	p, err := r.Progress(ctx, run, status)
	if err != nil {
		return nil, err
	}
	return p.Waits, nil
}

// explain says in what state a run of this progress is, and what it waits for.
func (f *follower) explain(p *Progress, status *schemas.RunStatus, system *System) {
	if p.State = status.State; outcomes.HasEnded(p.State) && p.Statuses[outcomes.Open] > 0 && status.By == "" {
		p.State = schemas.RunRunning // a group has opened since the status was read
	}
	p.Held = outcomes.For(status.WaitsFor).Held()
	p.Waits = append(p.Waits, runWaits(f.run, p, status, system)...)
}

// waits collects what work waits for.
type waits []outcomes.Wait

// add notes something that is waited for: what to do about it ("" for nothing), and why.
func (w *waits) add(what outcomes.For, fix, format string, args ...any) *outcomes.Wait {
	*w = append(*w, outcomes.Wait{For: what, Says: fmt.Sprintf(format, args...), Fix: fix})
	return &(*w)[len(*w)-1]
}

// grave is add of something that a person has to end.
func (w *waits) grave(what outcomes.For, fix, format string, args ...any) {
	w.add(what, fix, format, args...).Grave = true
}

// systemWaits says what holds up the whole pipeline.
func (r *Reader) systemWaits(x *System, faults []bus.Fault) []outcomes.Wait {
	w := waits{}
	for _, f := range faults {
		what, fix := r.Advise(f)
		w.grave(outcomes.ForSpace, capital(fix), "%s", what)
	}
	if len(x.Present) == 0 {
		w.add("", "Start the pipeline: 'meander up'",
			"No sampler and no reward service is running. This is what is stored")
	}
	runs := map[string]bool{}
	for _, p := range x.Present {
		runs[p.Service] = true
		if p.Waiting != "" && p.Service != schemas.ServiceReward { // of that runWaits says it
			does := "makes no samples now"
			if p.Service == schemas.ServiceStarting {
				does = "starts, and waits"
			}
			w.add("", "", "a sampler of lane %s %s: %s", p.Lane, does, p.Waiting)
		}
	}
	if len(x.Present) > 0 && !runs[schemas.ServiceSampler] && !runs[schemas.ServiceStarting] {
		says := "No sampler is running"
		if n := x.unanswered; n > 0 {
			says += fmt.Sprintf(": %s waiting", plural(n, "prompt"))
		}
		w.grave(outcomes.ForSampler, startSampler(x.Lanes), "%s", says)
	}
	if len(x.Present) > 0 && !runs[schemas.ServiceReward] && x.waiting[schemas.ServiceReward] == 0 { // else see below
		w.grave(outcomes.ForReward, "Start one: 'meander up', or 'meander-reward'",
			"No reward service is running: no sample is scored, and no group closes")
	}
	for i := range x.Streams {
		if what, fix := r.Scarce(&x.Streams[i]); what != "" {
			w.add("", capital(fix), "%s", what)
		}
	}
	for _, of := range []struct {
		stage string
		what  outcomes.For
	}{
		{schemas.ServiceIntake, outcomes.ForIntake},
		{schemas.ServiceReward, outcomes.ForReward},
		{schemas.ServiceAdvantage, outcomes.ForAdvantage},
	} {
		if n := x.waiting[of.stage]; n > 0 {
			w.grave(of.what, "Start the pipeline: 'meander up', or 'meander-"+of.stage+"'", "%s for %s, and none runs",
				waiting(n, "message"), of.stage)
		}
	}
	for _, lane := range slices.Sorted(maps.Keys(x.backlog)) {
		if n := x.backlog[lane]; n > 0 && !x.serves(lane) {
			w.grave(outcomes.ForSampler, startSampler(x.lanesOf(lane)), "%s for a sampler of lane %s, and none runs",
				waiting(n, "sample"), lane)
		}
	}
	return w
}

// startSampler says how to start a sampler of the model that was served last on the lanes.
func startSampler(lanes []*lane) string {
	if len(lanes) == 0 {
		return "Start one beside it: 'meander-sampler'. Or start all services again: 'meander up'"
	}
	last := slices.MaxFunc(lanes, func(a, b *lane) int { return cmp.Compare(a.Current.Announced, b.Current.Announced) })
	how := fmt.Sprintf("Start one beside it: 'meander-sampler --model %s'. Or start all services again: 'meander up "+
		"--model %[1]s'", last.Current.Model)
	if last.Current.Model != "synthetic" {
		how += "; a model of your own by its folder"
	}
	return how
}

// runWaits says what a run waits for, or what ended it. Lanes with a backlog and no sampler are in x.Waits already.
func runWaits(run schemas.Run, p *Progress, status *schemas.RunStatus, x *System) []outcomes.Wait {
	by := ""
	if status.By != "" {
		by = " by " + status.By
	}
	if status.Reason != "" {
		by += ": " + status.Reason
	}
	var w waits
	switch status.State {
	case schemas.RunPaused:
		w.grave(outcomes.ForResume, fmt.Sprintf("continue it with: meander resume %s", run), "paused%s", by)
		return w
	case schemas.StatusCancelled:
		w.add("", "", "cancelled%s; it stays so", by)
		return w
	}
	w.addRefusals(run, p, status)
	w.addFailures(run, p)
	if outcomes.HasEnded(p.State) {
		return w
	}
	w = append(w, x.Waits...)
	if p.Stages[0].Of == 0 && len(w) == 0 {
		w.add(outcomes.ForIntake, "see the dead letters of the run, and 'meander doctor'",
			"no prompt of it is accepted yet: intake waits until a sampler has announced its model, or the version "+
				"that the prompts name, and a reward service its functions; or the prompts were refused")
	}
	for _, lane := range slices.Sorted(maps.Keys(p.lanes)) {
		if p.unmade > 0 && lane != "" && !x.serves(lane) && x.backlog[lane] == 0 {
			w.grave(outcomes.ForSampler, startSampler(x.lanesOf(lane)), "No sampler of lane %s is running", lane)
		}
	}
	if status.Lost > 0 {
		w = append(w, outcomes.Lost(status.Lost))
	}
	if len(w) > 0 {
		return w
	}
	if status.Midway > 0 {
		w = append(w, outcomes.Midway(status.Midway))
	}
	if n := p.unmade - status.Midway; n > 0 {
		is := "are"
		if n == 1 {
			is = "is"
		}
		w.add("", "", "%s in the queue, or %s with a sampler", waiting(n, "sample"), is)
	}
	if p.Judged > 0 {
		w.add(outcomes.ForVerdict, fmt.Sprintf("give it with: meander verdict --run %s", run), "%s for a verdict",
			waiting(p.Judged, "sample"))
	}
	if n := p.unscored - p.Judged; n > 0 {
		says := waiting(n, "sample") + " for a score"
		for _, p := range x.Present {
			if p.Service == schemas.ServiceReward && p.Waiting != "" {
				says += fmt.Sprintf("; %s: %s", p.Instance, p.Waiting)
			}
		}
		w.add(outcomes.ForScore, "", "%s", says)
	}
	if status.WaitsFor == string(outcomes.ForBatch) {
		w = append(w, outcomes.Incomplete(run, status.OpenBatches))
	}
	if says := waiting(p.unclosed, "group"); p.unclosed > 0 && status.OpenBatches == 0 {
		w.add(outcomes.ForAdvantage, "", "%s to be closed", says)
	} else if p.unclosed > 0 {
		w.add(outcomes.ForBatch, "", "%s with all rewards for the others of the batch", says)
	}
	return w
}

// addRefusals says that prompts of a run were refused.
func (w *waits) addRefusals(run schemas.Run, p *Progress, status *schemas.RunStatus) {
	if n := status.Refused; n > 0 {
		says := "1 prompt could not be read, and was refused"
		if n > 1 {
			says = fmt.Sprintf("%d prompts could not be read, and were refused", n)
		}
		fix := fmt.Sprintf("Read why: 'meander dead ls --run %s'", run)
		w.add("", fix, "%s", says).Grave = status.Groups == 0
	}
	n := p.Statuses[schemas.StatusRefused]
	if n == 0 {
		return
	}
	says := fmt.Sprintf("%d of %d prompts were refused, the last one: ", n, p.Stages[0].Of)
	if p.Stages[0].Of == 1 {
		says = "The prompt was refused: "
	}
	w.add("", outcomes.FixRefused(p.refusedUID, p.refusal), "%s", says+p.refusal).Grave = int64(n) == p.Stages[0].Of
}

// addFailures says that groups of a run have failed.
func (w *waits) addFailures(run schemas.Run, p *Progress) {
	if n := p.Statuses[schemas.StatusFailed]; n > 0 {
		fix, of := outcomes.FixGroup(run, p.failedUID, schemas.StatusFailed, ""), p.Stages[0].Of
		w.add("", fix, "%d of %d groups failed, the last one: %s", n, of, p.failure).Grave = int64(n) == of
	}
}

// waiting says that so many things wait.
func waiting[N int64 | uint64](n N, thing string) string {
	if n == 1 {
		return "1 " + thing + " waits"
	}
	return fmt.Sprintf("%d %ss wait", n, thing)
}

// capital begins a text, which is of this project, with a capital letter.
func capital(text string) string { return strings.ToUpper(text[:1]) + text[1:] }

// plural says how many things are.
func plural(n uint64, thing string) string {
	if n == 1 {
		return "1 " + thing + " is"
	}
	return fmt.Sprintf("%d %ss are", n, thing)
}
