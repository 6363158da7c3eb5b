package command

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
)

// oneGroup is all that is stored of a run with one group of two samples.
type oneGroup struct {
	prompt       []byte
	record       schemas.GroupRecord
	trajectories []*schemas.Trajectory
	rewards      []*schemas.Reward
	result       *schemas.Advantage
	second       *schemas.Advantage // of the group that stands in for it
	letter       *schemas.Dead
	control      *schemas.Control
}

// groupOfRun reads the group of a run.
func groupOfRun(t *testing.T, b *bus.Bus, run schemas.Run) *oneGroup {
	t.Helper()
	g := &oneGroup{prompt: bustest.Encode(t, &schemas.Prompt{Prompt: "a red fox", UID: "p", GroupSize: new(int64(2))})}
	for stream, filters := range schemas.RunFilters(run) {
		for m, err := range b.Read(t.Context(), stream, filters, bus.ReadOptions{}) {
			if err != nil {
				t.Fatal(err)
			}
			var e schemas.Event
			switch a, _ := schemas.ParseSubject(m.Subject); a.Kind {
			case schemas.KindGroup:
				e = &g.record
			case schemas.KindTrajectory:
				g.trajectories = append(g.trajectories, &schemas.Trajectory{})
				e = g.trajectories[len(g.trajectories)-1]
			case schemas.KindReward:
				g.rewards = append(g.rewards, &schemas.Reward{})
				e = g.rewards[len(g.rewards)-1]
			case schemas.KindAdvantage:
				g.result = &schemas.Advantage{}
				e = g.result
			default:
				continue
			}
			if err := schemas.Decode(m.Data, e); err != nil {
				t.Fatal(err)
			}
		}
	}
	return g
}

// store stores the events under another run.
func (g *oneGroup) store(t *testing.T, b *bus.Bus, run schemas.Run) {
	t.Helper()
	put := func(e schemas.Keyed) {
		if _, err := b.Publish(t.Context(), e); err != nil {
			t.Fatalf("%s: %s: %v", run, e.Subject(), err)
		}
	}
	if _, err := b.PublishPrompt(t.Context(), run, g.prompt, nil); err != nil {
		t.Fatal(err)
	}
	if g.record.UID != "" {
		g.record.Run = run
		put(&g.record)
		put((*schemas.Opening)(&g.record))
	}
	for _, e := range g.trajectories {
		e.Run = run
		put(e)
	}
	for _, e := range g.rewards {
		e.Run = run
		put(e)
	}
	for _, e := range []*schemas.Advantage{g.result, g.second} {
		if e != nil {
			e.Run = run
			put(e)
		}
	}
	if g.letter != nil {
		g.letter.Run = run
		put(g.letter)
	}
	if c := g.control; c != nil {
		c.Run, c.Seq, c.Stored = run, 1, 1
		if _, _, err := b.PutControl(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
}

// closeAs gives the group a result without advantages.
func (g *oneGroup) closeAs(status, member string) {
	g.result.Status, g.result.Error, g.result.Mean, g.result.Std = status, "so it is", nil, nil
	for i := range g.result.Members {
		m := &g.result.Members[i]
		m.Status, m.Advantage = member, nil
		if member != schemas.StatusScored {
			m.Reward = nil
		}
	}
}

// lose takes the reward of a sample of a group that has advantages.
func (g *oneGroup) lose(i int, status string) {
	m := &g.result.Members[i]
	g.result.Status, m.Status, m.Reward, m.Advantage = schemas.StatusPartial, status, nil, nil
}

// fail makes the reward of a sample a failed one.
func (g *oneGroup) fail(i int) {
	r := g.rewards[i]
	r.Status, r.Error, r.Reward, r.Scores = schemas.StatusFailed, "the function failed", nil, nil
}

// outcomeCases are runs of each bad kind, and what every view says of them: state, groups by outcome, samples with a
// reward and samples that ended without one.
func outcomeCases() map[schemas.Run]struct {
	change func(*oneGroup)
	says   string
} {
	type c = struct {
		change func(*oneGroup)
		says   string
	}
	refused := func(uid schemas.UID) *schemas.Dead {
		return &schemas.Dead{
			Service: schemas.ServiceIntake, Code: schemas.CodeInvalid, Reason: "height: 17", UID: uid,
			OriginalSubject: "mdr.v1.prompt.x", Stream: schemas.StreamPrompts, StreamSeq: 1,
		}
	}
	return map[schemas.Run]c{
		"complete": {func(*oneGroup) {}, "complete [1 complete] 2 scored 0 failed"},
		"sample-failed": {func(g *oneGroup) {
			x := g.trajectories[1]
			x.StopReason, x.Error, x.Media, x.ContentDigest = schemas.StopFailed, "no memory", nil, ""
			g.fail(1)
			g.lose(1, schemas.StatusFailed)
		}, "partial [1 partial] 1 scored 1 failed"},
		"reward-failed": {func(g *oneGroup) {
			g.fail(0)
			g.fail(1)
			g.closeAs(schemas.StatusFailed, schemas.StatusFailed)
		}, "failed [1 failed] 0 scored 2 failed"},
		"deadline": {func(g *oneGroup) {
			g.trajectories, g.rewards = g.trajectories[:1], g.rewards[:1]
			g.lose(1, schemas.StatusMissing)
		}, "partial [1 partial] 1 scored 0 failed"},
		"cancelled": {func(g *oneGroup) {
			g.trajectories, g.rewards = g.trajectories[:1], g.rewards[:0]
			g.closeAs(schemas.StatusCancelled, schemas.StatusCancelled)
			g.control = &schemas.Control{Action: schemas.ControlCancel, By: "ada"}
		}, "cancelled [1 cancelled] 0 scored 0 failed"},
		"mixed":    {func(g *oneGroup) { g.closeAs(schemas.StatusMixed, schemas.StatusScored) }, "mixed [1 mixed] 2 scored 0 failed"},
		"stale":    {func(g *oneGroup) { g.closeAs(schemas.StatusStale, schemas.StatusScored) }, "stale [1 stale] 2 scored 0 failed"},
		"filtered": {func(g *oneGroup) { g.closeAs(schemas.StatusFiltered, schemas.StatusScored) }, "filtered [1 filtered] 2 scored 0 failed"},
		"refused": {func(g *oneGroup) {
			g.trajectories, g.rewards, g.letter = nil, nil, refused("p")
			g.closeAs(schemas.StatusRefused, schemas.StatusMissing)
		}, "refused [1 refused] 0 scored 0 failed"},
		"unreadable": {func(g *oneGroup) {
			*g = oneGroup{prompt: []byte("x"), letter: refused("")}
		}, "refused [] 0 scored 0 failed"},
		"unreadable-beside": {func(g *oneGroup) { g.letter = refused("") }, "complete [1 complete] 2 scored 0 failed"},
		"refilled": {func(g *oneGroup) {
			second := *g.result
			g.second, second.UID, second.Batch = &second, "p-1", "p-1"
			second.Refill = &schemas.Refill{Root: "p", Round: 1}
			g.closeAs(schemas.StatusFiltered, schemas.StatusScored)
			g.result.RefilledBy = "p-1"
			for i := range 2 {
				x, r := *g.trajectories[i], *g.rewards[i]
				x.UID, r.UID, x.Group.Batch, r.Group.Batch = "p-1", "p-1", "p-1", "p-1"
				g.trajectories, g.rewards = append(g.trajectories, &x), append(g.rewards, &r)
			}
		}, "complete [1 complete 1 refilled] 4 scored 0 failed"},
		"paused": {func(g *oneGroup) {
			g.rewards, g.result = nil, nil
			g.control = &schemas.Control{Action: schemas.ControlPause, By: "ada"}
		}, "paused [1 open] 0 scored 0 failed"},
		"unscored": {func(g *oneGroup) { g.rewards, g.result = g.rewards[:1], nil }, "waiting for a reward service [1 open] 1 scored 0 failed"},
		"half-batch": {func(g *oneGroup) {
			g.record.Group.Batch, g.record.Group.BatchGroups, g.result.Batch = "b", 2, "b"
			for i := range g.rewards {
				g.trajectories[i].Group, g.rewards[i].Group = g.record.Group, g.record.Group
			}
		}, "waiting for the batch [1 complete] 2 scored 0 failed"},
		"judged": {func(g *oneGroup) {
			g.rewards, g.result = nil, nil
			g.record.Group.Reward = []schemas.RewardSpec{{Name: "external:taste"}}
		}, "waiting for a verdict [1 open] 0 scored 0 failed"},
	}
}

// statusOf is the state that status says, and all of it in one line.
func statusOf(t *testing.T, run string) (state, says string) {
	t.Helper()
	var answer struct {
		Status struct {
			State    string `json:"state"`
			WaitsFor string `json:"waits_for"`
			Outcomes []struct {
				Outcome string `json:"outcome"`
				Groups  int    `json:"groups"`
			} `json:"outcomes"`
			Rewards int `json:"rewards"`
			Failed  int `json:"failed"`
		} `json:"status"`
	}
	if err := json.Unmarshal([]byte(expect(t, exitOK, "", "status", run, "--json")), &answer); err != nil {
		t.Fatal(err)
	}
	s, groups := answer.Status, []string{}
	for _, o := range s.Outcomes {
		groups = append(groups, fmt.Sprintf("%d %s", o.Groups, o.Outcome))
	}
	says = s.State
	if s.WaitsFor != "" {
		says = "waiting for " + s.WaitsFor
	}
	return s.State, fmt.Sprintf("%s %v %d scored %d failed", says, groups, s.Rewards, s.Failed)
}

// statusesOf are the outcomes of groups as the page, and the report, have them.
func statusesOf(p *view.Progress) []byte {
	data, _ := json.Marshal(p.Statuses) // counts always encode
	return data
}

// Every view of a run says the same, whatever became of it: status, top, the list, the report, the page and intake's
// answer to clients in other languages.
func TestOutcomes(t *testing.T) {
	bustest.Sequential(t, others)
	inStore(t)
	b := connected(t)
	cases := outcomeCases()
	for run, c := range cases {
		g := groupOfRun(t, b.Bus, "r1")
		c.change(g)
		g.store(t, b.Bus, run)
	}
	list := map[string]map[string]any{}
	for _, line := range linesOf(t, expect(t, exitOK, "", "runs", "ls", "--json")) {
		list[line["run"].(string)] = line
	}
	reader := newReader(t.Context(), b.Bus, true)
	defer reader.Close()
	var overview view.Overview
	if err := json.Unmarshal([]byte(expect(t, exitOK, "", "top", "--once", "--json")), &overview); err != nil {
		t.Fatal(err)
	}
	must(t, expect(t, exitOK, "", "status", "reward-failed"),
		"  reason    1 of 1 groups failed, the last one: so it is\n")
	must(t, expect(t, exitOK, "", "status", "unreadable-beside"), "1 complete, 1 prompt refused without one\n",
		"  reason    1 prompt could not be read, and was refused\n", "meander dead ls --run unreadable-beside")
	for run, c := range cases {
		t.Run(string(run), func(t *testing.T) {
			state, says := statusOf(t, string(run))
			if says != c.says {
				t.Errorf("status: %s\nwant    %s", says, c.says)
			}
			line := list[string(run)]
			counted := []string{}
			outcomes, _ := line["outcomes"].(map[string]any)
			for _, o := range slices.Sorted(maps.Keys(outcomes)) {
				counted = append(counted, fmt.Sprintf("%v %s", outcomes[o], o))
			}
			open := state == schemas.RunRunning // the list reads no records: it has no word for what is waited for
			if got := fmt.Sprintf("%v %v %v scored %v failed", line["state"], counted, line["scored"],
				line["failed"]); got != c.says && !open {
				t.Errorf("list: %s\nwant  %s", got, c.says)
			}
			p, err := reader.Progress(t.Context(), run, nil)
			if err != nil {
				t.Fatal(err)
			}
			of := []string{}
			for _, o := range slices.Sorted(maps.Keys(p.Statuses)) {
				of = append(of, fmt.Sprintf("%d %s", p.Statuses[o], o))
			}
			held := p.State
			if p.Held != "" {
				held = p.Held
			}
			// The page has the members that are missing or cancelled among those without a reward, too.
			if got, want := fmt.Sprintf("%s %v %d scored", held, of, p.Stages[2].Done),
				strings.Join(strings.SplitAfter(c.says, "scored")[:1], ""); got != want {
				t.Errorf("page: %s\nwant  %s", got, want)
			}
			for _, r := range overview.Runs {
				if r.Run == run && stateOf(r) != held {
					t.Errorf("top: %s, want %s", stateOf(r), held)
				}
			}
			if run == "unreadable" { // there is nothing to report
				return
			}
			must(t, reportOf(t, string(run)+".html", string(run)), `"name":"Outcome","value":"`+state+`"`,
				`"`+string(run)+`","epoch":`, fmt.Sprintf(`"statuses":%s,`, statusesOf(p)))
		})
	}
}
