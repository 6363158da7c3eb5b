package ui_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/ui"
)

// update stores what a trainer tells of an update of run r1.
func (s *served) update(t *testing.T, trainer string, step int64, change func(*schemas.Update)) {
	t.Helper()
	e := &schemas.Update{
		Run: "r1", Lane: "synthetic", Tenant: schemas.TenantMain, Trainer: trainer, Step: step, PolicyVersion: step,
		Loss: new(1 / float64(step)), ClipShare: new(0.1), KL: new(1e-5 * float64(step)), LearningRate: new(1e-4), At: time.Now().UnixNano(),
	}
	if change != nil {
		change(e)
	}
	if _, err := s.Bus.Publish(t.Context(), e); err != nil {
		t.Fatal(err)
	}
}

// Updates of two trainers are curves beside the rewards, while they come and in a report. One that restarted has each
// update once, the first; what is no update is left out.
func TestPage_Updates(t *testing.T) {
	s := servePage(t, nil)
	s.startPipeline(t)
	s.publish(t, "r1", "a", "a fox", nil)
	bustest.Await(t, s.Bus, 1, schemas.StreamAdvantages)
	for step := range int64(12) {
		s.update(t, "night", step+1, func(e *schemas.Update) {
			if e.Staleness = new(step % 2); step%4 == 3 {
				e.Evaluation = []schemas.Metric{{Name: "exact", Value: 0.5 + float64(step)/40}}
			}
		})
	}
	s.update(t, "follower", 1, nil)
	s.update(t, "follower", 3, nil)
	s.update(t, "night", 12, func(e *schemas.Update) { e.Loss = new(99.0) })
	s.Forge(t, schemas.UpdateSubject("r1", "synthetic", schemas.TenantMain, "night", 13), []byte("garbage"))
	var told object
	bustest.Until(t, "all updates", func() error {
		told = get[object](t, s, "runs/r1/updates?points=6")
		if got := fmt.Sprint(get[object](t, s, "runs/r1")["updates"]); got != "14" {
			return errors.New(got)
		}
		return nil
	})
	night := told["trainers"].([]any)[0].(object)
	curves := night["curves"].(object)
	loss, exact := curves["loss"].([]any), curves["evaluation/exact"].([]any)
	if fmt.Sprint(night["steps"]) != "[2 4 6 8 10 12]" || night["count"] != 12.0 || loss[5] != (1./11+1./12)/2 ||
		fmt.Sprint(exact) != "[<nil> 0.575 <nil> 0.675 <nil> 0.775]" {
		t.Errorf("curves %v", night)
	}
	if got := fmt.Sprint(told["numbers"]); got != "[loss clip_share kl lr staleness evaluation/exact]" {
		t.Errorf("numbers %s", got)
	}
	if got := get[object](t, s, "runs")["runs"].([]any)[0].(object)["updates"]; got != 15.0 { // with the garbage
		t.Errorf("updates in the list: %v", got)
	}

	p := startBrowser(t).open(t, s.url)
	see := func(where string) {
		p.to("#/runs/r1")
		p.shows("Training", "night: 12 updates of synthetic, version 12", "evaluation/exact", "clip share")
		p.until(`document.querySelectorAll("#updates canvas").length === 6`)
		for _, width := range []int{390, 1440, 2560} {
			p.size(width, 900)
			p.dark(width == 1440)
			p.awaitShown()
			if over := eval[int](p, "document.documentElement.scrollWidth - innerWidth"); over > 0 {
				t.Errorf("at %d px it scrolls sideways by %d", width, over)
			}
			p.save(fmt.Sprintf("updates%s-%d", where, width))
		}
	}
	see("")
	if file := os.Getenv("MEANDER_UI_AXE"); file != "" {
		p.accessible(axe(t), "updates")
	}
	s.update(t, "follower", 4, nil)
	p.shows("follower: 3 updates", "the last")
	file, _ := s.report(t, "r1", ui.ReportOptions{})
	s.stop()
	name := filepath.Join(t.TempDir(), "r1.html")
	if err := os.WriteFile(name, []byte(file), 0o600); err != nil {
		t.Fatal(err)
	}
	p = p.b.open(t, "file://"+name)
	p.awaitShown()
	see("-report")
}
