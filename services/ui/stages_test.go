package ui_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/ui"
)

// publishStages publishes prompts of several stages: "tree", whose paintings share what was thought, and "rounds",
// which a judge ends for sample 0 in the first of two. It returns how many groups close.
func (s *served) publishStages(t *testing.T) (closed int) {
	t.Helper()
	judge, err := s.Bus.Conn().QueueSubscribe(schemas.InteractSubject("critic"), "critic", func(m *nats.Msg) {
		r := &schemas.InteractRequest{}
		if err := schemas.DecodeValid(m.Data, r); err != nil {
			t.Error(err)
		}
		data, err := schemas.Encode(&schemas.InteractReply{
			Content: "the number is too low", Score: new(0.25), Terminate: r.SampleIndex == 0,
		})
		if err == nil {
			err = m.Respond(data)
		}
		if err != nil {
			t.Error(err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = judge.Unsubscribe() })
	stages := func(uid schemas.UID, change func(p *schemas.Prompt)) {
		s.publish(t, "stages", uid, "12+30=?", func(p *schemas.Prompt) {
			p.ImageSettings, p.GroupSize = schemas.ImageSettings{}, new(int64(4))
			p.Reward = []schemas.RewardSpec{{Name: "glyph", GroundTruth: "42"}}
			p.Stages = []schemas.StageSpec{
				{Name: "think", Routing: schemas.Routing{Model: "sums"}, Text: &schemas.Text{Temperature: new(0.0)}},
				{
					Name: "paint", Routing: schemas.Routing{Model: "signs"}, Prompt: `a blue sign that says "{think.text}"`, Children: new(int64(2)),
					ImageSettings: schemas.ImageSettings{NumInferenceSteps: new(int64(4))},
				},
			}
			change(p)
		})
	}
	stages("tree", func(p *schemas.Prompt) { p.Stages[0].Frozen = true })
	stages("rounds", func(p *schemas.Prompt) {
		p.Stages[0].Text.Temperature, p.Stages[1].Children = new(2.0), nil
		p.Rounds, p.GroupSize = new(int64(2)), new(int64(3))
		p.Stages = append(p.Stages, schemas.StageSpec{
			Name: "judge", Interaction: &schemas.Interaction{Name: "critic"}, Prompt: "{think.text}",
			ImageSettings: schemas.ImageSettings{Conditions: []schemas.Condition{{Name: "image", Stage: "paint"}}},
		})
	})
	stages("taste", func(p *schemas.Prompt) {
		p.Reward, p.Deadline = []schemas.RewardSpec{{Name: "external:taste"}}, new(time.Now().Add(time.Hour).UnixNano())
	})
	return 2
}

// The stages of samples are shown: each once, with what it made, and of each sample the one that stands for it.
func TestStages(t *testing.T) {
	s := servePage(t, func(c *ui.Config) { c.Admin = true })
	s.serveModel(t, models+"signs")
	s.serveModel(t, models+"sums")
	bustest.Await(t, s.Bus, 2, schemas.StreamPolicies)
	bustest.Await(t, s.Bus, s.publishStages(t), schemas.StreamAdvantages)
	bustest.Await(t, s.Bus, 6, schemas.StreamTrajectories, schemas.TrajectoryFilter("stages", "taste"))
	s.checkStagesOfGroups(t)
	s.checkStageSamples(t)
	s.checkStageVerdicts(t)
	s.checkStageReport(t)
}

// stageShown and groupShown are what the page is told.
type stageShown struct {
	Place, Stage, Kind, Prompt, Answer string
	Samples                            int64
	Trained, Ends                      bool
	Advantages                         []struct{ Value float64 }
	Judgement                          *float64
}

type groupShown struct {
	Samples []struct {
		Place       string
		SampleIndex int64 `json:"sample_index"`
		Advantage   float64
	}
	Stages []stageShown
}

func listStages(stages []stageShown) string {
	var all []string
	for _, x := range stages {
		all = append(all, x.Place)
	}
	return strings.Join(all, " ")
}

func (s *served) checkStagesOfGroups(t *testing.T) {
	t.Helper()
	tree := get[groupShown](t, s, "runs/stages/groups/tree")
	if got := listStages(tree.Stages); got != "0.think 0.paint 1.paint 2.think 2.paint 3.paint" {
		t.Errorf("stages %s", got)
	}
	for _, l := range tree.Samples {
		if l.Place != fmt.Sprintf("%d.paint", l.SampleIndex) {
			t.Errorf("%s stands for sample %d", l.Place, l.SampleIndex)
		}
		for _, x := range tree.Stages {
			if x.Place == l.Place && (!x.Trained || len(x.Advantages) != 1 || x.Advantages[0].Value != l.Advantage ||
				x.Prompt != fmt.Sprintf("a blue sign that says %q", "42")) {
				t.Errorf("%+v of %+v", x, l)
			}
		}
	}
	if x := tree.Stages[0]; x.Trained || x.Advantages != nil || x.Samples != 2 || x.Kind != "text" || x.Answer != "42" {
		t.Errorf("a frozen stage: %+v", x)
	}
	rounds := get[groupShown](t, s, "runs/stages/groups/rounds")
	if got := listStages(rounds.Stages); got != "0.think 0.paint 0.judge "+
		"1.think 1.paint 1.judge 1.think-2 1.paint-2 1.judge-2 "+
		"2.think 2.paint 2.judge 2.think-2 2.paint-2 2.judge-2" {
		t.Errorf("stages %s", got)
	}
	if x := rounds.Stages[2]; !x.Ends || *x.Judgement != 0.25 || x.Answer != "the number is too low" || x.Trained {
		t.Errorf("the judge: %+v", x)
	}
}

func (s *served) checkStageSamples(t *testing.T) {
	t.Helper()
	// What several samples share has no result of its own, and parts into theirs; what one has has that one's.
	type sample struct {
		Prompt  string
		Reward  *float64
		Line    struct{ Place string }
		Stages  []stageShown
		Samples []object
		Tokens  []object
	}
	if x := get[sample](t, s, "runs/stages/groups/tree/2.think"); x.Reward != nil ||
		listStages(x.Stages) != "2.think 2.paint 3.paint" || len(x.Samples) != 2 || len(x.Tokens) == 0 {
		t.Errorf("a shared stage: %+v", x)
	}
	for _, place := range []string{"1", "1.paint-2"} {
		x := get[sample](t, s, "runs/stages/groups/rounds/"+place)
		if x.Reward == nil || x.Line.Place != "1.paint-2" || len(x.Stages) != 6 {
			t.Errorf("sample %s: %+v", place, x)
		}
	}
	for path, want := range map[string]int{
		"/media/stages/rounds/1/image": http.StatusOK, "/media/stages/rounds/1.paint/image": http.StatusOK, "/media/stages/rounds/1.judge/condition-0": http.StatusOK,
		"/media/stages/rounds/1.think/image": http.StatusNotFound, "/media/stages/rounds/0.paint-2/image": http.StatusNotFound, "/api/runs/stages/groups/rounds/0.paint-2": http.StatusNotFound,
		"/api/runs/stages/groups/rounds/0.%20": http.StatusBadRequest, "/api/runs/stages/groups/rounds/0.": http.StatusBadRequest,
	} {
		if status, _, body := s.ask(t, "GET", path, nil); status != want {
			t.Errorf("%s: %d %.100s", path, status, body)
		}
	}
}

func (s *served) checkStageVerdicts(t *testing.T) {
	t.Helper()
	// People judge samples, by what stands for them.
	waiting := get[struct{ Waiting []object }](t, s, "runs/stages/verdicts").Waiting
	for i, w := range waiting {
		if w["sample_index"] != float64(i) || w["line"].(object)["place"] != fmt.Sprintf("%d.paint", i) {
			t.Errorf("waits: %v", w)
		}
	}
	if len(waiting) != 4 {
		t.Errorf("%d wait", len(waiting))
	}
	status, body := s.change(t, "runs/stages/groups/taste/3/verdict", object{"name": "taste", "value": 1})
	if status != http.StatusOK {
		t.Errorf("verdict: %d %s", status, body)
	}
	bustest.Await(t, s.Bus, 1, schemas.StreamVerdicts, schemas.VerdictSubject("stages", "taste", 3, "taste"))
}

func (s *served) checkStageReport(t *testing.T) {
	t.Helper()
	// The report has the same, and no server.
	file, contents := s.report(t, "stages", ui.ReportOptions{})
	var data struct {
		Answers map[string]json.RawMessage
		Media   map[string]string
	}
	found := regexp.MustCompile(`(?s)id="data">(.*?)</script>`).FindStringSubmatch(file)
	if err := json.Unmarshal([]byte(found[1]), &data); err != nil {
		t.Fatal(err)
	}
	for _, uid := range []string{"tree", "rounds"} {
		for _, x := range get[groupShown](t, s, "runs/stages/groups/"+uid).Stages {
			if data.Answers["runs/stages/groups/"+uid+"/"+x.Place] == nil ||
				x.Kind == "image" && data.Media["stages/"+uid+"/"+x.Place+"/image"] == "" {
				t.Errorf("the report lacks %s of %s", x.Place, uid)
			}
		}
	}
	if got := string(data.Answers["runs/stages/groups/tree/1"]); got != `"runs/stages/groups/tree/1.paint"` || contents.DetailsLeftOut != 0 {
		t.Errorf("sample 1: %s, %+v", got, contents)
	}
}
