package ui

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/outcomes"
	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/boot"
)

// Bounds of a report.
const (
	// DefaultGroups and MaxGroups are how many groups a report has unless told, and at most.
	DefaultGroups, MaxGroups = 100, 1000
	// DefaultImageBytes is the most bytes of all images together, in base64. Mail makes a file larger by a third, and
	// many servers take 20 MiB.
	DefaultImageBytes = 12 << 20

	maxTextBytes = 3 << 20 // of JSON of groups, and as much again of single samples
	maxSamples   = 64      // of a group
)

// ReportOptions choose what a report has.
type ReportOptions struct {
	// Groups is how many groups there are, those that closed last, 1 to MaxGroups; 0: DefaultGroups.
	Groups int
	// ImageBytes is the most bytes of all images together; 0: DefaultImageBytes.
	ImageBytes int
	Made       time.Time
	// Piece and Again are as in Config.
	Piece func(id int32) string
	Again func(schemas.Run, []view.Given, bool) *view.Again
}

// Contents says what a report has, and what it does not have.
type Contents struct {
	// Groups and Samples are there. GroupsLeftOut are not, and SamplesLeftOut are not, of groups that are. Of the
	// samples DetailsLeftOut are in their group alone.
	Groups         int `json:"groups"`
	GroupsLeftOut  int `json:"groups_left_out"`
	Samples        int `json:"samples"`
	SamplesLeftOut int `json:"samples_left_out"`
	DetailsLeftOut int `json:"details_left_out"`
	// Images are there, Reduced of them smaller than they are stored. ImagesLeftOut did not fit; ImagesGone are no
	// longer stored, or cannot be read.
	Images        int `json:"images"`
	Reduced       int `json:"images_reduced"`
	ImagesLeftOut int `json:"images_left_out"`
	ImagesGone    int `json:"images_gone"`
}

// report is what a file has instead of a server: the answers by their path, the images by theirs.
type report struct {
	Run     schemas.Run       `json:"run"`
	Made    int64             `json:"made"` // Unix milliseconds
	Facts   []view.Fact       `json:"facts"`
	Metrics []view.Fact       `json:"metrics"`
	Notes   []string          `json:"notes"` // what is left out
	Answers map[string]any    `json:"answers"`
	Media   map[string]string `json:"media"`
}

// WriteReport writes the page of a run with all its data into one file, which needs nothing else. It fails if the
// server cannot be read or w not be written to; images that are no longer stored are no failure.
func WriteReport(
	ctx context.Context, w io.Writer, b *bus.Bus, run *results.Run, o ReportOptions,
) (*Contents, error) {
	o.Groups, o.ImageBytes = cmp.Or(o.Groups, DefaultGroups), cmp.Or(o.ImageBytes, DefaultImageBytes)
	if o.Groups < 0 || o.Groups > MaxGroups || o.ImageBytes < 0 {
		return nil, fmt.Errorf("report: %d groups, %d bytes of images; must be 1 to %d groups, and bytes above 0",
			o.Groups, o.ImageBytes, MaxGroups)
	}
	reader := view.NewReader(ctx, b, view.Options{
		Advise: boot.Advise, Scarce: boot.Scarce, Piece: o.Piece, Again: o.Again,
	})
	defer reader.Close()
	name, contents := run.Summary.Run, &Contents{}
	r := &report{
		Run: name, Made: o.Made.UnixMilli(), Facts: factsOf(run), Metrics: metricsOf(run),
		Notes: []string{}, Media: map[string]string{},
		Answers: map[string]any{"page": pageMay{Tones: outcomes.Tones(), Outcomes: outcomes.GroupOutcomes()}},
	}
	list, err := reader.Runs(ctx, view.RunList{Run: name})
	if err != nil {
		return nil, err
	}
	list.Total, list.Waits, list.Dead = list.Matched, []outcomes.Wait{}, 0
	list.States, list.Models, list.Tags = []string{}, []string{}, []string{} // they are of all runs
	r.Answers["runs"] = list
	for path, read := range map[string]func() (any, error){
		"":         func() (any, error) { return reader.Progress(ctx, name, nil) },
		"/curve":   func() (any, error) { return reader.Curve(ctx, name, "", 400) },
		"/updates": func() (any, error) { return reader.Updates(ctx, name, 400) },
		"/settings": func() (any, error) {
			settings, err := reader.Settings(ctx, name)
			if errors.Is(err, bus.ErrNotFound) {
				err = nil
			}
			return settings, err
		},
	} {
		if r.Answers["runs/"+string(name)+path], err = read(); err != nil {
			return nil, err
		}
	}
	if err := r.addGroups(ctx, reader, o.Groups, contents); err != nil {
		return nil, err
	}
	if err := r.addImages(ctx, b, o.ImageBytes, contents); err != nil {
		return nil, err
	}
	r.noteLeftOut(o, contents)
	data, err := json.Marshal(r)
	if err != nil {
		return nil, fmt.Errorf("write report: %w", err)
	}
	if _, err := w.Write(asFile(data, string(name))); err != nil {
		return nil, fmt.Errorf("write report: %w", err)
	}
	return contents, nil
}

// addGroups adds the groups that closed last, as many as are wanted and fit, with their best samples.
func (r *report) addGroups(ctx context.Context, reader *view.Reader, most int, c *Contents) error {
	path := "runs/" + string(r.Run) + "/groups"
	rows, err := reader.Groups(ctx, r.Run, view.List{Order: "newest", Limit: view.MaxRows})
	if err != nil {
		return err
	}
	all := len(rows.Rows)
	slices.SortStableFunc(rows.Rows, func(a, b view.GroupRow) int { return cmp.Compare(b.Closed, a.Closed) })
	room, rest := maxTextBytes, maxTextBytes
	rows.Rows = rows.Rows[:min(most, all)]
	for i, row := range rows.Rows {
		g, samples, err := reader.Whole(ctx, r.Run, row.UID, maxSamples)
		if err != nil {
			return err
		}
		if room -= sizeOf(g) + sizeOf(row); room < 0 && i > 0 {
			rows.Rows = rows.Rows[:i]
			break
		}
		c.Groups, c.Samples = c.Groups+1, c.Samples+len(g.Samples)
		c.SamplesLeftOut, g.Total = c.SamplesLeftOut+g.Total-len(g.Samples), len(g.Samples)
		at := path + "/" + string(row.UID)
		r.Answers[at] = g
		for _, s := range samples {
			s.States = []int64{} // they are computed from tensors, which stay where they are
			if rest -= sizeOf(s); rest >= 0 {
				r.Answers[at+"/"+s.Line.Place] = s
			}
		}
		for _, l := range g.Samples {
			place, index := at+"/"+l.Place, fmt.Sprintf("%s/%d", at, l.SampleIndex)
			switch _, there := r.Answers[place]; {
			case !there && l.Stored:
				c.DetailsLeftOut++
			case there && place != index:
				r.Answers[index] = place
			}
		}
	}
	rows.Total, rows.All, c.GroupsLeftOut = c.Groups, c.Groups, all-c.Groups+rows.LeftOut
	r.Answers[path] = rows
	return nil
}

// sizeOf is how many bytes of the file a value takes.
func sizeOf(v any) int {
	data, _ := json.Marshal(v) // the file fails to be written otherwise, too
	return len(data)
}

// factsOf says what the run was, and how much there is of it.
func factsOf(run *results.Run) (facts []view.Fact) {
	add := func(name, value string) {
		if value != "" {
			facts = append(facts, view.Fact{Name: name, Value: value})
		}
	}
	lanes, weights, sources := map[string]int{}, map[string]int{}, map[string]int{}
	groups, samples, versions := map[string]int{}, map[string]int{}, map[int64]bool{}
	var rewards, means []float64
	for _, g := range run.Groups {
		groups[g.Status]++
		sources[string(g.Source)]++
		if g.Mean != nil {
			means = append(means, *g.Mean)
		}
		for i := range g.Members {
			m := &g.Members[i]
			samples[m.Status]++
			if m.Reward != nil {
				rewards = append(rewards, *m.Reward)
			}
			if t := m.Trajectory(); t != nil {
				lanes[string(t.Lane)]++
				weights[t.WeightsDigest]++
				versions[t.PolicyVersionMin], versions[t.PolicyVersionMax] = true, true
			}
		}
	}
	add("Outcome", run.Summary.State)
	if of := some(sources); of != "" {
		add("A pass over", "run "+of+", which has the prompts and the samples")
	}
	add("Model", some(lanes))
	add("Weights", some(weights))
	if known := slices.Sorted(maps.Keys(versions)); len(known) > 1 {
		add("Policy version", fmt.Sprintf("%d to %d", known[0], known[len(known)-1]))
	} else if len(known) > 0 {
		add("Policy version", fmt.Sprint(known[0]))
	}
	add("Groups", counts(len(run.Groups), groups))
	add("Samples", counts(run.Summary.Samples, samples))
	add("Rewards of samples", spread(rewards))
	add("Means of groups", spread(means))
	add("Steps stored", fmt.Sprint(run.Summary.StepsStored))
	if run.Summary.Refills > 0 {
		add("Groups replaced", fmt.Sprint(run.Summary.Refills))
	}
	add("Digest", run.Summary.Digest)
	return facts
}

func metricsOf(run *results.Run) []view.Fact {
	facts := []view.Fact{}
	for _, name := range slices.Sorted(maps.Keys(run.Summary.Metrics)) {
		facts = append(facts, view.Fact{Name: name, Value: fmt.Sprintf("%.6g", run.Summary.Metrics[name]), Mono: true})
	}
	return facts
}

// counts says a number, and of which kinds it is: "5: 4 complete, 1 open".
func counts(all int, of map[string]int) string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(of)) {
		parts = append(parts, fmt.Sprintf("%d %s", of[name], name))
	}
	return strings.TrimSuffix(fmt.Sprintf("%d: %s", all, strings.Join(parts, ", ")), ": ")
}

// some lists names in order, the empty one aside, and counts them where they are many.
func some(names map[string]int) string {
	const most = 3
	delete(names, "")
	list := slices.Sorted(maps.Keys(names))
	if n := len(list) - most; n > 0 {
		return fmt.Sprintf("%s and %d more", strings.Join(list[:most], ", "), n)
	}
	return strings.Join(list, ", ")
}

// spread describes values; the standard deviation divides by n - 1.
func spread(values []float64) string {
	n := float64(len(values))
	if n == 0 {
		return ""
	}
	mean, squares := 0.0, 0.0
	for _, v := range values {
		mean += v / n
	}
	for _, v := range values {
		squares += (v - mean) * (v - mean)
	}
	return fmt.Sprintf("%d: mean %.4f, std %.4f, from %.4f to %.4f", len(values), mean,
		math.Sqrt(squares/max(1, n-1)), slices.Min(values), slices.Max(values))
}

// noteLeftOut says what the file does not have, and why.
func (r *report) noteLeftOut(o ReportOptions, c *Contents) {
	note := func(n int, format string, args ...any) {
		if n > 0 {
			r.Notes = append(r.Notes, fmt.Sprintf(format, args...))
		}
	}
	all, why, text := c.Groups+c.GroupsLeftOut, "", boot.Bytes(maxTextBytes)
	if c.Groups < o.Groups {
		why = fmt.Sprintf(" The texts of a file take about %v at most.", text)
	}
	note(c.GroupsLeftOut, "Groups left out: %d of %d. The %d that closed last are here.%s", c.GroupsLeftOut, all,
		c.Groups, why)
	note(c.SamplesLeftOut, "Samples of these groups left out: %d of %d. The best %d of a group are here at most.",
		c.SamplesLeftOut, c.Samples+c.SamplesLeftOut, maxSamples)
	note(c.DetailsLeftOut, "Samples without a page of their own: %d of %d. Those pages take about %v at most.",
		c.DetailsLeftOut, c.Samples, text)
	room := fmt.Sprintf("All images and sounds together take %v at most, so that the file can be mailed.",
		boot.Bytes(o.ImageBytes))
	note(c.Reduced, "Images reduced to JPEG: %d of %d. %s", c.Reduced, c.Images, room)
	note(c.ImagesLeftOut, "Images and sounds left out: %d. %s", c.ImagesLeftOut, room)
	note(c.ImagesGone, "Images and sounds that are no longer stored, or cannot be read: %d.", c.ImagesGone)
}

// asFile returns the page with its data, styles and scripts inside. Scripts are found by an import map, so they are
// those of the page but for the names from which they import.
func asFile(data []byte, title string) []byte {
	file := func(name string) []byte {
		text, err := page.ReadFile("page/" + name)
		if err != nil {
			panic(err) // it is embedded
		}
		return text
	}
	imports := map[string]string{}
	for _, pattern := range []string{"page/*.js", "page/vendor/*.js"} {
		names, _ := fs.Glob(page, pattern) // the patterns are right
		for _, name := range names {
			text := bytes.ReplaceAll(file(strings.TrimPrefix(name, "page/")), []byte(`from "./`), []byte(`from "page/`))
			imports[name] = "data:text/javascript;base64," + base64.StdEncoding.EncodeToString(text)
		}
	}
	scripts, _ := json.Marshal(map[string]any{"imports": imports}) // texts always encode
	start := []byte(`import "page/app.js";`)
	allowed := "data:"
	for _, inline := range [][]byte{scripts, start} {
		sum := sha256.Sum256(inline)
		allowed += " 'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'"
	}
	head := fmt.Sprintf(`<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; media-src data:; `+
		`style-src 'unsafe-inline'; script-src %s; base-uri 'none'; form-action 'none'; `+
		`require-trusted-types-for 'script'; trusted-types 'none'">
<title>Run %s</title>
<style>
%s%s</style>
<script type="application/json" id="data">%s</script>
<script type="importmap">%s</script>
<script type="module">%s</script>
</head>`, allowed, title, file("vendor/uplot.css"), file("style.css"), data, scripts, start)
	before, rest, _ := bytes.Cut(file("index.html"), []byte("<title>"))
	_, body, _ := bytes.Cut(rest, []byte("</head>"))
	return slices.Concat(before, []byte(head), body)
}
