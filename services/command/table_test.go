package command

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/outcomes"
	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
)

// groupOf is a group of scored samples, and of failed ones behind them.
func groupOf(scored, failed int) *results.Group {
	g := &results.Group{GroupResult: view.GroupResult{UID: "p", Prompt: "a fox", Status: schemas.StatusPartial}}
	for i := range scored + failed {
		m := view.Member{SampleResult: view.SampleResult{
			SampleIndex: int64(i), Status: schemas.StatusFailed, Error: "no image",
		}}
		if i < scored {
			m.SampleResult = view.SampleResult{
				SampleIndex: int64(i), Status: schemas.StatusScored, Reward: new(float64(100 - i)), Advantage: new(0.0),
			}
		}
		g.Members = append(g.Members, m)
	}
	return g
}

// Of more samples than fit the best and the worst are shown, of those that have a reward.
func TestBestAndWorst(t *testing.T) {
	for _, c := range []struct {
		scored, failed, most int
		want                 string
		gap, more            int
	}{
		{3, 1, 4, "0 1 2 3", 0, 0},
		{16, 0, 4, "0 1 14 15", 2, 12},
		{16, 4, 5, "0 1 2 14 15", 3, 15},
		{3, 9, 4, "0 1 2", 0, 9},
		{0, 9, 4, "", 0, 9},
		{9, 0, 1, "0", 1, 8},
	} {
		g := groupOf(c.scored, c.failed)
		members, gap, more := bestAndWorst(g, c.most)
		var shown []string
		for _, m := range members {
			shown = append(shown, fmt.Sprint(m.SampleIndex))
		}
		if got := strings.Join(shown, " "); got != c.want || gap != c.gap || more != c.more ||
			len(g.Members) != c.scored+c.failed {
			t.Errorf("%d scored, %d failed, %d shown: %q, gap %d, %d more; want %q, %d, %d", c.scored, c.failed, c.most,
				got, gap, more, c.want, c.gap, c.more)
		}
	}
}

// A table of many samples is bounded, has its worst, and says what was read and what was said by the names of each.
func TestPrintRun_Details(t *testing.T) {
	g := groupOf(16, 0)
	g.Members[0].Scores = []view.Score{
		{Name: "glyph", Detail: "EXIT"},
		{Name: "external", Detail: strings.Repeat("crooked letters ", 10)},
	}
	var out strings.Builder
	printRun(&out, &results.Run{Groups: []*results.Group{g}})
	for _, want := range []string{
		"sample       #0", "#12", "#15\n", "…", "glyph read   \"EXIT\"",
		"and 8 more samples\n", "#0 external says ",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is not in\n%s", want, &out)
		}
	}
	if strings.Contains(out.String(), "external read") || strings.Contains(out.String(), "#8") {
		t.Errorf("external reads, or all samples are shown:\n%s", &out)
	}
}

// A table with a line for each group names those that stood in.
func TestPrintRun_StoodIn(t *testing.T) {
	var groups []*results.Group
	for range fewGroups + 1 {
		groups = append(groups, groupOf(2, 0))
	}
	var out strings.Builder
	if printRun(&out, &results.Run{Groups: groups}); strings.Contains(out.String(), "REPLACED") {
		t.Errorf("without:\n%s", &out)
	}
	groups[3].Group = "p-r1"
	out.Reset()
	printRun(&out, &results.Run{Groups: groups})
	if !strings.Contains(out.String(), "REPLACED BY") || !strings.Contains(out.String(), "p      p-r1") {
		t.Errorf("with one:\n%s", &out)
	}
}

// A score of an optional function that failed is in no reward and no error of its sample: below the table stands why.
func TestPrintRun_FailedScores(t *testing.T) {
	failed := func(name, why string) view.Score {
		return view.Score{Name: name, Status: schemas.StatusFailed, Error: why}
	}
	away := failed("http:a", "http:a: away")
	g := func(uid string) *results.Group {
		g := groupOf(2, 2)
		g.UID = schemas.UID(uid)
		g.Members[0].Scores, g.Members[1].Scores = []view.Score{away}, []view.Score{away}
		g.Members[2].Error, g.Members[2].Scores = "no score succeeded", []view.Score{away, failed("ocr", "no text")}
		g.Members[3].Error, g.Members[3].Scores = "required score ocr: no text", []view.Score{failed("ocr", "no text")}
		return g
	}
	var out strings.Builder
	printRun(&out, &results.Run{Groups: []*results.Group{g("u")}})
	for _, want := range []string{
		"  #0 #1 #2 http:a failed: away\n", "  #2 failed: no score succeeded\n", "  #2 ocr failed: no text\n",
		"  #3 failed: required score ocr: no text\n",
	} {
		if strings.Count(out.String(), want) != 1 {
			t.Errorf("%q is not there once:\n%s", want, out.String())
		}
	}
	out.Reset()
	many := &results.Run{}
	for i := range fewGroups + 1 {
		many.Groups = append(many.Groups, g(fmt.Sprint("u", i)))
	}
	printRun(&out, many)
	if want := "27 samples http:a failed: away\n"; !strings.Contains(out.String(), want) {
		t.Errorf("%q is not there:\n%s", want, out.String())
	}
}

// A run that is not complete says why, by the statuses of its groups.
func TestNotComplete(t *testing.T) {
	same := func(status string) string { return status }
	if err := notComplete([]string{"complete", "complete"}, same); err != nil {
		t.Error(err)
	}
	err := notComplete([]string{"complete", "filtered", "cancelled", "filtered"}, same)
	exit, ok := errors.AsType[*exitError](err)
	if !ok || exit.status != exitFailed || !strings.Contains(err.Error(),
		"3 of 4 groups not complete: 1 cancelled; 2 left out because all rewards are equal") {
		t.Error(err)
	}
	for _, s := range schemas.GroupStatuses {
		if s != schemas.StatusComplete && outcomes.Lacks(s) == "" {
			t.Errorf("status %s is not explained", s)
		}
	}
}

// Wherever a table has a standard deviation, it says of which kind: that of the groups is what their estimator takes,
// that of the summary is verl's.
func TestTable_SaysWhichStandardDeviation(t *testing.T) {
	t.Parallel()
	group := func(uid schemas.UID, scale, basis string) *results.Group {
		return &results.Group{GroupResult: view.GroupResult{
			UID: uid, Status: schemas.StatusComplete, Mean: new(.75), Std: new(.5), StdScale: scale, StdBasis: basis,
		}}
	}
	table := func(groups ...*results.Group) string {
		var out strings.Builder
		r := &results.Run{Groups: groups}
		r.Summary.Metrics = map[string]float64{"critic/rewards/mean": .75, "critic/rewards/std_mean": .433}
		printRun(&out, r)
		return out.String()
	}
	many := make([]*results.Group, 40)
	for i := range many {
		many[i] = group("p", schemas.StdGroup, schemas.BasisSample)
	}
	mixed := append([]*results.Group{group("q", schemas.StdGlobal, schemas.BasisPopulation)}, many...)
	for _, tt := range []struct {
		groups []*results.Group
		want   []string
	}{
		{many[:1], []string{"std 0.500 (sample)", "std in a group 0.433 (population)"}},
		{mixed[:1], []string{"std 0.500 (population, batch)"}},
		{many, []string{"STD (sample)", "std in a group 0.433 (population)"}},
		{mixed, []string{"0.500 (population, batch)", "0.500 (sample)"}},
	} {
		got := table(tt.groups...)
		for _, want := range tt.want {
			if !strings.Contains(got, want) {
				t.Errorf("%d groups: no %q in\n%s", len(tt.groups), want, got)
			}
		}
	}
}
