package report

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/schemas"
)

// page is all that page.html lays out.
type page struct {
	Run, Made string
	Facts     []fact
	Rewards   []spread
	Chart     *chart
	Metrics   []fact
	Notes     []string // what is left out
	Groups    []group
	Contents  Contents
}

// fact is a name with its value.
type fact struct{ Name, Value string }

// spread describes rewards in numbers.
type spread struct {
	Name                 string
	Count                int
	Mean, Std, Min, Most string
}

// newPage returns the page of a run without its groups.
func newPage(run *results.Run, o Options) *page {
	p := &page{Run: string(run.Summary.Run), Made: clock(o.Made)}
	p.addFacts(run)
	var samples, means []float64
	for _, g := range run.Groups {
		for _, m := range g.Members {
			if m.Reward != nil {
				samples = append(samples, *m.Reward)
			}
		}
		if g.Mean != nil {
			means = append(means, *g.Mean)
		}
	}
	for _, s := range []spread{spreadOf("all samples", samples), spreadOf("means of groups", means)} {
		if s.Count > 0 {
			p.Rewards = append(p.Rewards, s)
		}
	}
	p.Chart = newChart(run.Groups)
	for _, name := range slices.Sorted(maps.Keys(run.Summary.Metrics)) {
		p.Metrics = append(p.Metrics, fact{name, fmt.Sprintf("%.6g", run.Summary.Metrics[name])})
	}
	return p
}

// addFacts adds what the run was, and how much there is of it.
func (p *page) addFacts(run *results.Run) {
	add := func(name, value string) { p.Facts = append(p.Facts, fact{name, value}) }
	lanes, weights, sources := map[string]bool{}, map[string]bool{}, map[string]bool{}
	groups, samples := map[string]int{}, map[string]int{}
	var v versions
	newest := newestFirst(run.Groups)
	oldest := newest
	for len(oldest) > 0 && oldest[len(oldest)-1].Closed.IsZero() {
		oldest = oldest[:len(oldest)-1]
	}
	if n := len(oldest); n > 0 {
		add("groups closed", clock(oldest[n-1].Closed)+" to "+clock(oldest[0].Closed))
	}
	for _, g := range run.Groups {
		groups[g.Status]++
		if g.Source != "" {
			sources[string(g.Source)] = true
		}
		for i := range g.Members {
			samples[g.Members[i].Status]++
			t := g.Members[i].Trajectory()
			if t == nil {
				continue
			}
			v.add(t)
			if t.Lane != "" {
				lanes[string(t.Lane)] = true
			}
			if t.WeightsDigest != "" {
				weights[t.WeightsDigest] = true
			}
		}
	}
	if len(sources) > 0 {
		add("a pass over", "run "+some(sources)+", which has the prompts and the samples")
	}
	if len(lanes) > 0 {
		add("model", some(lanes))
	}
	if len(weights) > 0 {
		add("weights (digest)", some(weights))
	}
	if v.any {
		add("policy version", v.String())
	}
	add("outcome", run.Summary.State)
	add("groups", counts(len(run.Groups), groups))
	add("samples", counts(run.Summary.Samples, samples))
	add("steps stored", fmt.Sprint(run.Summary.StepsStored))
	if run.Summary.Refills > 0 {
		add("groups replaced", fmt.Sprint(run.Summary.Refills))
	}
	add("digest of the run", run.Summary.Digest)
}

// counts says a number, and of which kinds it is: "5: 4 complete, 1 open".
func counts(all int, of map[string]int) string {
	if len(of) == 0 {
		return fmt.Sprint(all)
	}
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(of)) {
		parts = append(parts, fmt.Sprintf("%d %s", of[name], name))
	}
	return fmt.Sprintf("%d: %s", all, strings.Join(parts, ", "))
}

// some lists names in order, and counts them where they are many.
func some(names map[string]bool) string {
	const most = 3
	list := slices.Sorted(maps.Keys(names))
	if n := len(list) - most; n > 0 {
		return fmt.Sprintf("%s and %d more", strings.Join(list[:most], ", "), n)
	}
	return strings.Join(list, ", ")
}

// versions are the policy versions that samples were made with.
type versions struct {
	any         bool
	first, last int64
}

// add adds the versions of a trajectory, nil for none.
func (v *versions) add(t *schemas.Trajectory) {
	if t == nil {
		return
	}
	if !v.any {
		v.any, v.first, v.last = true, t.PolicyVersionMin, t.PolicyVersionMax
	}
	v.first, v.last = min(v.first, t.PolicyVersionMin), max(v.last, t.PolicyVersionMax)
}

// String returns one version, or the first and the last.
func (v *versions) String() string {
	if v.first == v.last {
		return fmt.Sprint(v.first)
	}
	return fmt.Sprintf("%d to %d", v.first, v.last)
}

// spreadOf describes values; the standard deviation is that of a sample, by n - 1.
func spreadOf(name string, values []float64) spread {
	s := spread{Name: name, Count: len(values), Std: "-"}
	if s.Count == 0 {
		return s
	}
	m, squares := mean(values), 0.0
	for _, v := range values {
		squares += (v - m) * (v - m)
	}
	if s.Count > 1 {
		s.Std = fmt.Sprintf("%.4f", math.Sqrt(squares/float64(s.Count-1)))
	}
	s.Mean = fmt.Sprintf("%.4f", m)
	s.Min, s.Most = fmt.Sprintf("%.4f", slices.Min(values)), fmt.Sprintf("%.4f", slices.Max(values))
	return s
}

// mean returns the mean of values, of which there is at least one.
func mean(values []float64) float64 {
	sum := 0.0
	for _, v := range values {
		sum += v
	}
	return sum / float64(len(values))
}

// noteLeftOut adds to the page what it does not show, and why.
func (p *page) noteLeftOut(o Options) {
	c := &p.Contents
	note := func(n int, format string, args ...any) {
		if n > 0 {
			p.Notes = append(p.Notes, fmt.Sprintf(format, args...))
		}
	}
	all, why := c.Groups+c.GroupsLeftOut, ""
	if c.Groups < o.Groups {
		why = fmt.Sprintf(" The texts of a page take about %s at most.", mib(maxTextBytes))
	}
	note(c.GroupsLeftOut, "Groups left out: %d of %d. The %d that closed last are here.%s",
		c.GroupsLeftOut, all, c.Groups, why)
	note(c.SamplesLeftOut, "Samples of these groups left out: %d of %d. The best %d of a group are here at most.",
		c.SamplesLeftOut, c.Samples+c.SamplesLeftOut, maxSamples)
	room := fmt.Sprintf("All images together take %s at most, so that the file can be mailed.", mib(o.ImageBytes))
	note(c.Reduced, "Images reduced to JPEG: %d of %d. %s", c.Reduced, c.Images, room)
	note(c.ImagesLeftOut, "Images left out: %d. %s", c.ImagesLeftOut, room)
	note(c.ImagesGone, "Images that are no longer stored, or cannot be read: %d.", c.ImagesGone)
}

// mib formats a number of bytes.
func mib(n int) string {
	if n < 1<<20 {
		return fmt.Sprintf("%.4g KiB", float64(n)/(1<<10))
	}
	return fmt.Sprintf("%.4g MiB", float64(n)/(1<<20))
}
