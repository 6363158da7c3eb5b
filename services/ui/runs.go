package ui

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/outcomes"
	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/boot"
)

// maxRuns is how many runs a list has, the newest; maxPage how many groups, samples or letters a page has.
const maxRuns, maxPage = 500, 200

// RunLine is one run in the list.
type RunLine struct {
	*results.StoredRun
	// Held says in a few words what a running one waits for.
	Held string `json:"held,omitempty"`
	// Steps is how many step events are stored of it.
	Steps uint64 `json:"steps"`

	judged bool // what is not scored waits for a verdict
}

// readRuns reads the list of runs, the newest first.
func (s *server) readRuns(ctx context.Context) ([]*RunLine, error) {
	before := map[schemas.Run]*results.StoredRun{}
	if last := s.runs.peek(); last != nil {
		for _, line := range *last {
			before[line.Run] = line.StoredRun
		}
	}
	stored, err := results.Runs(ctx, s.bus, "*")
	if err == nil {
		err = results.AddSizes(ctx, s.bus, stored, before)
	}
	if err != nil {
		return nil, err
	}
	lines := []*RunLine{}
	for _, r := range stored {
		line := &RunLine{StoredRun: r, Steps: r.Streams[schemas.StreamSteps]}
		if r.State == schemas.RunRunning && r.Streams[schemas.StreamRequests] == 0 && r.Samples > r.Scored+r.Failed {
			if line.judged, err = r.WantsVerdicts(ctx, s.bus); err != nil {
				return nil, err
			}
		}
		lines = append(lines, line)
	}
	slices.SortFunc(lines, func(a, b *RunLine) int {
		return cmp.Or(b.Newest.Compare(a.Newest), cmp.Compare(a.Run, b.Run))
	})
	return lines, nil
}

// runList is the list of runs, as pages get it.
type runList struct {
	Runs  []*RunLine      `json:"runs"`
	Total int             `json:"total"`
	Waits []outcomes.Wait `json:"waits"`
	// Dead is how many dead letters are stored.
	Dead uint64 `json:"dead"`
}

// listRuns returns the list of runs, and what holds up the whole pipeline.
func (s *server) listRuns(ctx context.Context) (*runList, error) {
	lines, err := s.runs.get(ctx)
	if err != nil {
		return nil, err
	}
	system, err := s.system.get(ctx)
	if err != nil {
		return nil, err
	}
	shown := make([]*RunLine, min(len(lines), maxRuns))
	for i := range shown { // the lines are shared
		line := *lines[i]
		if line.State == schemas.RunRunning {
			line.Held = heldInList(&line, system).Held()
		}
		shown[i] = &line
	}
	return &runList{shown, len(lines), system.Waits, system.Dead}, nil
}

func (s *server) answerRuns(r *http.Request) (any, error) { return s.listRuns(r.Context()) }

// runOf returns the run that a request is about.
func runOf(r *http.Request) (schemas.Run, error) {
	run := schemas.Run(r.PathValue("run"))
	if err := schemas.CheckToken("run", run); err != nil {
		return "", &requestError{http.StatusBadRequest, err.Error()}
	}
	return run, nil
}

// followed returns the follower of the run that a request is about.
func (s *server) followed(r *http.Request) (*follower, error) {
	run, err := runOf(r)
	if err != nil {
		return nil, err
	}
	return s.followerOf(r.Context(), run)
}

// number reads a number of a request's query that lies between least and most; absent: def.
func number(r *http.Request, name string, def, least, most int) (int, error) {
	text := r.FormValue(name)
	if text == "" {
		return def, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < least || n > most {
		return 0, &requestError{
			http.StatusBadRequest,
			fmt.Sprintf("%s: %q; must be a number from %d to %d", name, text, least, most),
		}
	}
	return n, nil
}

func (s *server) answerRun(r *http.Request) (any, error) {
	f, err := s.followed(r)
	if err != nil {
		return nil, err
	}
	return s.describe(r.Context(), f)
}

// describe returns the progress of a run, and what it waits for.
func (s *server) describe(ctx context.Context, f *follower) (*Progress, error) {
	system, err := s.system.get(ctx)
	if err != nil {
		return nil, err
	}
	return f.describe(ctx, system)
}

// describe returns the progress of the run, and what it waits for in a pipeline of this state.
func (f *follower) describe(ctx context.Context, system *System) (*Progress, error) {
	status, err := f.status.get(ctx)
	if err != nil {
		return nil, err
	}
	p := f.progress()
	f.explain(p, status, system)
	return p, nil
}

// explain says in what state a run of this progress is, and what it waits for.
func (f *follower) explain(p *Progress, status *schemas.RunStatus, system *System) {
	if p.State = status.State; outcomes.HasEnded(p.State) && p.Statuses[outcomes.Open] > 0 && status.By == "" {
		p.State = schemas.RunRunning // a group has opened since the status was read
	}
	if p.State == schemas.RunRunning {
		p.Held = heldBy(p, status, system).Held()
	}
	p.Waits = append(p.Waits, runWaits(f.run, p, status, system)...)
}

// groupList is a page of the groups of a run.
type groupList struct {
	Rows  []GroupRow `json:"rows"`
	Total int        `json:"total"`
	// All is how many groups the run has, whatever was asked for.
	All      int    `json:"all"`
	Epoch    string `json:"epoch"`
	Revision uint64 `json:"revision"`
	LeftOut  int    `json:"left_out,omitempty"`
}

// answerGroups answers with a page of the groups of a run: offset, limit, order, status and text say which.
func (s *server) answerGroups(r *http.Request) (any, error) {
	offset, err := number(r, "offset", 0, 0, maxRows)
	if err != nil {
		return nil, err
	}
	limit, err := number(r, "limit", 50, 1, maxPage)
	if err != nil {
		return nil, err
	}
	order := cmp.Or(r.FormValue("order"), "newest")
	if orders := []string{"newest", "oldest", "best", "worst", "spread"}; !slices.Contains(orders, order) {
		return nil, &requestError{http.StatusBadRequest, fmt.Sprintf("order: %q; must be one of %v", order, orders)}
	}
	f, err := s.followed(r)
	if err != nil {
		return nil, err
	}
	rows, total := f.rowsOf(
		list{order: order, status: r.FormValue("status"), text: r.FormValue("text"), offset: offset, limit: limit},
	)
	f.mu.Lock()
	defer f.mu.Unlock()
	return &groupList{
		Rows:     rows,
		Total:    total,
		All:      len(f.order),
		Epoch:    f.epoch,
		Revision: f.revision,
		LeftOut:  f.leftOut,
	}, nil
}

// answerCurve answers with the rewards of a run over time, of one data source or of all, and with the names of the
// data sources.
func (s *server) answerCurve(r *http.Request) (any, error) {
	most, err := number(r, "points", 400, 1, 2000)
	if err != nil {
		return nil, err
	}
	f, err := s.followed(r)
	if err != nil {
		return nil, err
	}
	points, sources := f.curve(r.FormValue("data_source"), most)
	return map[string]any{"points": points, "data_sources": sources}, nil
}

// heldBy returns what holds up an open run of this progress.
func heldBy(p *Progress, status *schemas.RunStatus, x *System) outcomes.For {
	f := x.facts
	if p.Statuses[outcomes.Open] == 0 {
		f.Batches = status.OpenBatches
	}
	f.Unmade, f.Unscored, f.Judged = p.unmade, p.unscored, p.Judged
	if p.Stages[0].Of > 0 {
		f.Unanswered = 0 // those of other runs
	}
	for lane := range p.lanes {
		f.Unserved = f.Unserved || p.unmade > 0 && lane != "" && f.Sampler && !x.serves(lane)
	}
	return f.HeldBy()
}

// heldInList returns what holds up an open run, as far as its counts say.
func heldInList(r *RunLine, x *System) outcomes.For {
	f := x.facts
	f.Unmade, f.Unscored = int64(r.Streams[schemas.StreamRequests]), max(0, int64(r.Samples-r.Scored-r.Failed))
	if r.Open == 0 {
		f.Batches = r.OpenBatches
	}
	if r.Groups > 0 {
		f.Unanswered = 0
	}
	if r.judged {
		f.Judged = f.Unscored
	}
	return f.HeldBy()
}

// systemWaits says what holds up the whole pipeline.
func systemWaits(x *System, faults []bus.Fault) []outcomes.Wait {
	waits := []outcomes.Wait{}
	for _, f := range faults {
		if f.Full() {
			x.facts.Full = true
		}
		what, fix := boot.Advise(f)
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
		switch {
		case p.Starting == "":
		case p.Service == schemas.ServiceStarting:
			waits = append(waits, outcomes.Wait{Says: fmt.Sprintf("a sampler of lane %s starts, and waits: %s", p.Lane,
				p.Starting)})
		default:
			waits = append(waits, outcomes.Wait{Says: fmt.Sprintf("a sampler of lane %s makes no samples now: %s", p.Lane,
				p.Starting)})
		}
	}
	x.facts.Sampler = runs[schemas.ServiceSampler] || runs[schemas.ServiceStarting]
	x.facts.Reward, x.facts.Unanswered = runs[schemas.ServiceReward], int64(x.unanswered)
	for _, n := range x.backlog {
		x.facts.Unmade += int64(n)
	}
	if len(x.Present) > 0 && !x.facts.Sampler {
		says := "No sampler is running"
		if n := x.unanswered; n > 0 {
			says += fmt.Sprintf(": %s waiting", plural(n, "prompt"))
		}
		waits = append(waits, outcomes.Wait{For: outcomes.ForSampler, Grave: true, Says: says, Fix: startSampler(x.Lanes)})
	}
	if len(x.Present) > 0 && !runs[schemas.ServiceReward] && x.waiting[schemas.ServiceReward] == 0 { // else see below
		waits = append(waits, outcomes.Wait{
			For: outcomes.ForReward, Grave: true,
			Says: "No reward service is running: no sample is scored, and no group closes",
			Fix:  "Start one: 'meander up', or 'meander-reward'",
		})
	}
	for i := range x.Streams {
		if what, fix := boot.Scarce(&x.Streams[i]); what != "" {
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
		what, fix := boot.LostRequests(status.Lost)
		waits = append(waits, outcomes.Wait{For: outcomes.ForIntake, Grave: true, Says: what, Fix: capital(fix)})
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
	if heldBy(p, status, x) == outcomes.ForBatch {
		waits = append(waits, outcomes.Incomplete(run, status.OpenBatches))
	}
	if p.unclosed > 0 {
		w := outcomes.Wait{
			For: outcomes.ForBatch, Says: waiting(p.unclosed, "group") + " with all rewards for the others of the batch",
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

// milliseconds returns a moment for the page; 0 for none.
func milliseconds(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMilli()
}
