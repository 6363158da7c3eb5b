package report_test

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/report"
	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
)

// runOf is a run of groups whose samples are texts of that many bytes each, closed one second after the other.
func runOf(groups, samples, size int) *results.Run {
	run := &results.Run{Summary: results.Summary{Run: "r", Groups: groups, Samples: groups * samples}}
	for i := range groups {
		g := &results.Group{Closed: time.Unix(int64(i), 0), GroupResult: view.GroupResult{
			UID: schemas.UID(fmt.Sprintf("p%04d", i)), Prompt: "a fox", Status: schemas.StatusComplete, Mean: new(float64(i)),
		}}
		for k := range samples {
			turn := schemas.Turn{Generated: true, Text: strings.Repeat("<", size)}
			g.Members = append(g.Members, view.Member{
				SampleResult: view.SampleResult{SampleIndex: int64(k), Status: schemas.StatusScored, Reward: new(float64(k))},
				Text:         &view.Text{Answer: turn.Text, Turns: []schemas.Turn{turn}},
			})
		}
		run.Groups = append(run.Groups, g)
	}
	return run
}

// The page has a most size, whatever the run, and says what is left out for it.
func TestWrite_Bounds(t *testing.T) {
	for _, tt := range []struct {
		name                  string
		groups, samples, size int
		says                  []string
	}{
		{"few", 3, 2, 10, nil},
		{"groups", 150, 2, 10, []string{"Groups left out: 50 of 150. The 100 that closed last are here."}},
		{"texts", 90, 60, 4100, []string{
			"Groups left out: ", "The texts of a page take about 3 MiB at most.", "(100 characters left out)",
		}},
		{"samples", 3, 1000, 10, []string{
			"Samples of these groups left out: 2808 of 3000. The best 64 of a group are here at most.",
		}},
		{"points", 1000, 1, 10, []string{"a point is the mean of 4 groups"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var page bytes.Buffer
			contents, err := report.Write(t.Context(), &page, nil, runOf(tt.groups, tt.samples, tt.size), report.Options{})
			if err != nil {
				t.Fatal(err)
			}
			if page.Len() > 4<<20 || contents.Groups+contents.GroupsLeftOut != tt.groups {
				t.Errorf("%d bytes, %+v", page.Len(), contents)
			}
			for _, want := range tt.says {
				if !strings.Contains(page.String(), want) {
					t.Errorf("does not say %q", want)
				}
			}
			if left := strings.Contains(page.String(), "eft out"); left != (tt.says != nil) {
				t.Errorf("says that something is left out: %v", left)
			}
			last := fmt.Sprintf("<dd>p%04d</dd>", tt.groups-1)
			if first := strings.Index(page.String(), "<dd>p"); !strings.HasPrefix(page.String()[first:], last) {
				t.Error("the group that closed last is not the first")
			}
		})
	}
	for _, o := range []report.Options{{Groups: -1}, {Groups: report.MaxGroups + 1}, {ImageBytes: -1}} {
		if _, err := report.Write(t.Context(), &bytes.Buffer{}, nil, runOf(1, 1, 1), o); err == nil {
			t.Errorf("%+v is no error", o)
		}
	}
}
