package ui_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/ui"
)

// report writes the report of a run.
func (s *served) report(t *testing.T, run schemas.Run, o ui.ReportOptions) (string, *ui.Contents) {
	t.Helper()
	read, err := results.Read(t.Context(), s.Bus, run)
	if err != nil {
		t.Fatal(err)
	}
	var file bytes.Buffer
	o.Made = time.Unix(1700000000, 0)
	contents, err := ui.WriteReport(t.Context(), &file, s.Bus, read, o)
	if err != nil {
		t.Fatal(err)
	}
	return file.String(), contents
}

// A report is the page, opened from a file: a run of 500 samples, its groups and its samples, without a server.
func TestPage_Report(t *testing.T) {
	bustest.Sequential(t, "the browser has a file, no server; TestReport_Bounds writes one too")
	b := startBrowser(t)
	s := servePage(t, nil)
	s.startPipeline(t)
	const groups, size = 10, 50
	for i := range groups {
		text := fmt.Sprintf("a fox %d </script><script>alert(1)</script>", i)
		s.publish(t, "night", schemas.UID(fmt.Sprintf("p%d", i)), text, func(p *schemas.Prompt) {
			p.GroupSize, p.Seed = new(int64(size)), new(int64(i))
		})
	}
	bustest.Await(t, s.Bus, groups, schemas.StreamAdvantages)
	const room = 2 << 20
	file, contents := s.report(t, "night", ui.ReportOptions{ImageBytes: room})
	if contents.Samples != groups*size || contents.Images+contents.ImagesLeftOut != groups*size ||
		contents.Images < groups*size/2 || len(file) > room+7<<20 {
		t.Errorf("%d bytes, %+v", len(file), contents)
	}
	s.stop()
	name := filepath.Join(t.TempDir(), "night.html")
	if err := os.WriteFile(name, []byte(file), 0o600); err != nil {
		t.Fatal(err)
	}
	p := b.open(t, "file://"+name)
	p.awaitShown()
	p.shows("About this file", "a fox 9 </script>", "10: 10 complete")
	p.save("report-run")
	p.follow("#/runs/night/p3")
	p.until(`document.querySelectorAll(".sample img").length > 20`)
	p.save("report-group")
	p.to("#/runs/night/p3/7")
	p.shows("Sample 7", "Seed", "Log-prob by step")
	p.save("report-sample")
	p.to("#/runs/night?text=fox+3&order=best")
	p.until(`document.querySelectorAll("a.row").length === 1`)
	p.to("#/runs")
	p.shows("night")
	p.to("#/system")
	p.shows("This is not in the file")
	p.size(390, 844)
	p.to("#/runs/night")
	p.until(`document.documentElement.scrollWidth <= innerWidth`)
	p.save("report-phone")
}

// A report has a most size, whatever the run, and says what is left out for it.
func TestReport_Bounds(t *testing.T) {
	s := servePage(t, nil)
	s.startPipeline(t)
	for i := range 3 {
		s.publish(t, "r", schemas.UID(fmt.Sprintf("p%d", i)), "a fox",
			func(p *schemas.Prompt) { p.GroupSize = new(int64(70)) })
	}
	bustest.Await(t, s.Bus, 3, schemas.StreamAdvantages)
	file, contents := s.report(t, "r", ui.ReportOptions{Groups: 2, ImageBytes: 1})
	if contents.Groups != 2 || contents.GroupsLeftOut != 1 || contents.SamplesLeftOut != 12 ||
		contents.ImagesLeftOut != 128 {
		t.Errorf("%+v", contents)
	}
	for _, want := range []string{
		"Groups left out: 1 of 3. The 2 that closed last are here.",
		"Samples of these groups left out: 12 of 140. The best 64 of a group are here at most.",
		"Images and sounds left out: 128. All images and sounds together take 1B at most",
	} {
		if !strings.Contains(file, want) {
			t.Errorf("does not say %q", want)
		}
	}
	for _, o := range []ui.ReportOptions{{Groups: -1}, {Groups: ui.MaxGroups + 1}, {ImageBytes: -1}} {
		if _, err := ui.WriteReport(t.Context(), &bytes.Buffer{}, s.Bus, &results.Run{}, o); err == nil {
			t.Errorf("%+v is no error", o)
		}
	}
}
