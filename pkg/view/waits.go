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

// Progress returns how far a run is, and what it waits for, or what ended it.
func (r *Reader) Progress(ctx context.Context, run schemas.Run) (*Progress, error) {
	system, err := r.system.Get(ctx)
	if err != nil {
		return nil, err
	}
	f, err := r.follow(ctx, run)
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
	f.explain(p, status, system)
	return p, nil
}

// explain says in what state a run of this progress is, and what it waits for.
func (f *follower) explain(p *Progress, status *schemas.RunStatus, system *System) {
	if p.State = status.State; outcomes.HasEnded(p.State) && p.Statuses[outcomes.Open] > 0 && status.By == "" {
		p.State = schemas.RunRunning // a group has opened since the status was read
	}
	p.Held = outcomes.For(status.WaitsFor).Held()
	p.Waits = append(p.Waits, runWaits(f.run, p, status, system)...)
}

// systemWaits says what holds up the whole pipeline.
func (r *Reader) systemWaits(x *System, faults []bus.Fault) []outcomes.Wait {
	waits := []outcomes.Wait{}
	for _, f := range faults {
		what, fix := r.Advise(f)
		waits = append(waits, outcomes.Wait{For: outcomes.ForSpace, Grave: true, Says: what, Fix: capital(fix)})
	}
	if len(x.Present) == 0 {
		waits = append(waits, outcomes.Wait{
			Says: "No sampler and no reward service is running. This is what is stored",
			Fix:  "Start the pipeline: 'meander up'",
		})
	}
	runs := map[string]bool{}
	for _, p := range x.Present {
		runs[p.Service] = true
		if p.Waiting != "" {
			does := "makes no samples now"
			if p.Service == schemas.ServiceStarting {
				does = "starts, and waits"
			}
			says := fmt.Sprintf("a sampler of lane %s %s: %s", p.Lane, does, p.Waiting)
			waits = append(waits, outcomes.Wait{Says: says})
		}
	}
	if len(x.Present) > 0 && !runs[schemas.ServiceSampler] && !runs[schemas.ServiceStarting] {
		says := "No sampler is running"
		if n := x.unanswered; n > 0 {
			says += fmt.Sprintf(": %s waiting", plural(n, "prompt"))
		}
		waits = append(waits, outcomes.Wait{
			For: outcomes.ForSampler, Grave: true, Says: says, Fix: startSampler(x.Lanes),
		})
	}
	if len(x.Present) > 0 && !runs[schemas.ServiceReward] && x.waiting[schemas.ServiceReward] == 0 { // else see below
		waits = append(waits, outcomes.Wait{
			For: outcomes.ForReward, Grave: true,
			Says: "No reward service is running: no sample is scored, and no group closes",
			Fix:  "Start one: 'meander up', or 'meander-reward'",
		})
	}
	for i := range x.Streams {
		if what, fix := r.Scarce(&x.Streams[i]); what != "" {
			waits = append(waits, outcomes.Wait{Says: what, Fix: capital(fix)})
		}
	}
	fors := map[string]outcomes.For{
		schemas.ServiceIntake: outcomes.ForIntake, schemas.ServiceReward: outcomes.ForReward,
		schemas.ServiceAdvantage: outcomes.ForAdvantage,
	}
	for _, stage := range []string{schemas.ServiceIntake, schemas.ServiceReward, schemas.ServiceAdvantage} {
		if n := x.waiting[stage]; n > 0 {
			waits = append(waits, outcomes.Wait{
				For: fors[stage], Grave: true,
				Says: fmt.Sprintf("%s for %s, and none runs", waiting(n, "message"), stage),
				Fix:  "Start the pipeline: 'meander up', or 'meander-" + stage + "'",
			})
		}
	}
	for _, lane := range slices.Sorted(maps.Keys(x.backlog)) {
		if n := x.backlog[lane]; n > 0 && !x.serves(lane) {
			waits = append(waits, outcomes.Wait{
				For: outcomes.ForSampler, Grave: true,
				Says: fmt.Sprintf("%s for a sampler of lane %s, and none runs", waiting(n, "sample"), lane),
				Fix:  startSampler(x.lanesOf(lane)),
			})
		}
	}
	return waits
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
	switch status.State {
	case schemas.RunPaused:
		return []outcomes.Wait{{
			For: outcomes.ForResume, Grave: true, Says: "paused" + by,
			Fix: fmt.Sprintf("continue it with: meander resume %s", run),
		}}
	case schemas.StatusCancelled:
		return []outcomes.Wait{{Says: "cancelled" + by + "; it stays so"}}
	}
	waits := append(refusals(run, p, status), failures(run, p)...)
	if outcomes.HasEnded(p.State) {
		return waits
	}
	waits = append(waits, x.Waits...)
	if p.Stages[0].Of == 0 && len(waits) == 0 {
		waits = append(waits, outcomes.Wait{
			For: outcomes.ForIntake,
			Says: "no prompt of it is accepted yet: intake waits until a sampler has announced its model and a " +
				"reward " + "service its reward functions, or the prompts were refused",
			Fix: "see the dead letters of the run, and 'meander doctor'",
		})
	}
	for _, lane := range slices.Sorted(maps.Keys(p.lanes)) {
		if p.unmade > 0 && lane != "" && !x.serves(lane) && x.backlog[lane] == 0 {
			waits = append(waits, outcomes.Wait{
				For: outcomes.ForSampler, Grave: true, Says: fmt.Sprintf("No sampler of lane %s is running", lane),
				Fix: startSampler(x.lanesOf(lane)),
			})
		}
	}
	if status.Lost > 0 {
		waits = append(waits, outcomes.Lost(status.Lost))
	}
	if len(waits) > 0 {
		return waits
	}
	if p.unmade > 0 {
		is := "are"
		if p.unmade == 1 {
			is = "is"
		}
		says := waiting(p.unmade, "sample") + " in the queue, or " + is + " with a sampler"
		waits = append(waits, outcomes.Wait{Says: says})
	}
	if p.Judged > 0 {
		waits = append(waits, outcomes.Wait{
			For: outcomes.ForVerdict, Says: waiting(p.Judged, "sample") + " for a verdict",
			Fix: fmt.Sprintf("give it with: meander verdict --run %s", run),
		})
	}
	if n := p.unscored - p.Judged; n > 0 {
		waits = append(waits, outcomes.Wait{For: outcomes.ForScore, Says: waiting(n, "sample") + " for a score"})
	}
	if status.WaitsFor == string(outcomes.ForBatch) {
		waits = append(waits, outcomes.Incomplete(run, status.OpenBatches))
	}
	if p.unclosed > 0 {
		w := outcomes.Wait{
			For:  outcomes.ForBatch,
			Says: waiting(p.unclosed, "group") + " with all rewards for the others of the batch",
		}
		if status.OpenBatches == 0 {
			w = outcomes.Wait{For: outcomes.ForAdvantage, Says: waiting(p.unclosed, "group") + " to be closed"}
		}
		waits = append(waits, w)
	}
	return waits
}

// refusals says that prompts of a run were refused.
func refusals(run schemas.Run, p *Progress, status *schemas.RunStatus) []outcomes.Wait {
	n := p.Statuses[schemas.StatusRefused]
	var waits []outcomes.Wait
	if status.Refused > 0 {
		says := "1 prompt could not be read, and was refused"
		if status.Refused > 1 {
			says = fmt.Sprintf("%d prompts could not be read, and were refused", status.Refused)
		}
		waits = append(waits, outcomes.Wait{
			Grave: status.Groups == 0, Says: says, Fix: fmt.Sprintf("Read why: 'meander dead ls --run %s'", run),
		})
	}
	if n == 0 {
		return waits
	}
	says := fmt.Sprintf("%d of %d prompts were refused, the last one: ", n, p.Stages[0].Of)
	if p.Stages[0].Of == 1 {
		says = "The prompt was refused: "
	}
	what := "the prompt"
	if field, _, named := strings.Cut(p.refusal, ": "); named && !strings.Contains(field, " ") {
		what = field
	}
	return append(waits, outcomes.Wait{
		Grave: int64(n) == p.Stages[0].Of, Says: says + p.refusal,
		Fix: fmt.Sprintf("Correct %s, and publish the prompt again with another uid: %q is used", what, p.refusedUID),
	})
}

// failures says that groups of a run have failed.
func failures(run schemas.Run, p *Progress) []outcomes.Wait {
	n := p.Statuses[schemas.StatusFailed]
	if n == 0 {
		return nil
	}
	return []outcomes.Wait{{
		Grave: int64(n) == p.Stages[0].Of,
		Says:  fmt.Sprintf("%d of %d groups failed, the last one: %s", n, p.Stages[0].Of, p.failure),
		Fix:   fmt.Sprintf("See its samples with: meander show --run %s %s", run, p.failedUID),
	}}
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
