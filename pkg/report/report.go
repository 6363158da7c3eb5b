// Package report makes of a run one HTML page that needs nothing else: no scripts, no other files, no network. It can
// be mailed, kept beside a paper, or opened years later. The page has what the run was, its rewards, and its newest
// groups with their samples: images inside the page, texts, rewards, and what the reward functions read.
//
// Write is the way in, and 'meander report' calls it with a run that results.Read gives. A page has a most size:
// Options and the constants beside it say which. What does not fit is left out or reduced, and the page says so.
//
// contents gathers what the page says (page), fitter makes images fit, page.html lays it out.
package report

import (
	"cmp"
	"context"
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
)

// Bounds of a page.
const (
	// DefaultGroups and MaxGroups are how many groups a page shows unless told, and at most.
	DefaultGroups, MaxGroups = 100, 1000
	// DefaultImageBytes is the most bytes of all images together, as the page holds them, in base64. Mail
	// makes a file larger by a third, and many servers take 20 MiB.
	DefaultImageBytes = 12 << 20

	maxTextBytes = 3 << 20 // of prompts, answers and all else about groups, about
	groupBytes   = 900     // of the page for a group without its texts, about
	sampleBytes  = 600     // of the page for a sample without its texts and image, about
	maxSamples   = 64      // of a group
	maxPrompt    = 2000    // characters, as are those below
	maxAnswer    = 4000
	maxReason    = 500
)

// Options choose what a page shows.
type Options struct {
	// Groups is how many groups are shown, those that closed last, 1 to MaxGroups; 0: DefaultGroups.
	Groups int
	// ImageBytes is the most bytes of all images together; 0: DefaultImageBytes.
	ImageBytes int
	// Made is when the page was made.
	Made time.Time
}

// Contents says what a page has, and what it does not have.
type Contents struct {
	// Groups and Samples are shown. GroupsLeftOut are not, and SamplesLeftOut are not, of groups that are.
	Groups         int `json:"groups"`
	GroupsLeftOut  int `json:"groups_left_out"`
	Samples        int `json:"samples"`
	SamplesLeftOut int `json:"samples_left_out"`
	// Images are shown, of which Reduced are not as stored but smaller; ImagesLeftOut did not fit, ImagesGone are no
	// longer stored or cannot be read.
	Images        int `json:"images"`
	Reduced       int `json:"images_reduced"`
	ImagesLeftOut int `json:"images_left_out"`
	ImagesGone    int `json:"images_gone"`
}

//go:embed page.html
var layout string

var pageTemplate = template.Must(template.New("report").Parse(layout))

// Write writes the page of a run. It fails if the server cannot be read or w not be written to; images that are no
// longer stored are no failure.
func Write(ctx context.Context, w io.Writer, b *bus.Bus, run *results.Run, o Options) (*Contents, error) {
	o.Groups, o.ImageBytes = cmp.Or(o.Groups, DefaultGroups), cmp.Or(o.ImageBytes, DefaultImageBytes)
	if o.Groups < 0 || o.Groups > MaxGroups || o.ImageBytes < 0 {
		return nil, fmt.Errorf("report: %d groups, %d bytes of images; must be 1 to %d groups, and bytes above 0",
			o.Groups, o.ImageBytes, MaxGroups)
	}
	p := newPage(run, o)
	fit := &fitter{bus: b, left: o.ImageBytes, contents: &p.Contents}
	if err := p.addGroups(ctx, newestFirst(run.Groups), o.Groups, fit); err != nil {
		return nil, err
	}
	p.noteLeftOut(o)
	if err := pageTemplate.Execute(w, p); err != nil {
		return nil, fmt.Errorf("write report: %w", err)
	}
	return &p.Contents, nil
}

// newestFirst returns groups by falling time of closing; those without a result come last, in the order of the run.
func newestFirst(groups []*results.Group) []*results.Group {
	groups = slices.Clone(groups)
	slices.SortStableFunc(groups, func(a, b *results.Group) int { return b.Closed.Compare(a.Closed) })
	return groups
}

// group is a group as the page shows it.
type group struct {
	UID, Prompt, Status, Error string
	Facts                      []fact
	Samples                    []sample
	More                       int // samples that are not shown
}

// sample is a sample as the page shows it.
type sample struct {
	Index             int64
	Reward, Advantage string
	// Tone is good or bad where the advantage is above or below 0.
	Tone   string
	Image  template.URL
	Alt    string
	Absent string // why there is no image
	Says   []said // of a text, what the model and others said
	Scores []string
	Reason string // of a failure
}

// said is one turn of a text.
type said struct{ Who, Text string }

// addGroups adds the first groups of the list, as many as are wanted and fit. Images share the room evenly: what one
// does not need is for those after it.
func (p *page) addGroups(ctx context.Context, list []*results.Group, most int, fit *fitter) error {
	room := maxTextBytes
	var shown []*results.Group
	for _, g := range list {
		g = cutGroup(g)
		if room -= groupCost(g); len(shown) == most || room < 0 && len(shown) > 0 {
			break
		}
		shown = append(shown, g)
		for i := range g.Members {
			if t := g.Members[i].Trajectory(); t != nil && t.Image != nil {
				fit.images++
			}
		}
	}
	for k, g := range shown {
		out := newGroup(g)
		for i := range g.Members {
			s, err := fit.sample(ctx, g, &g.Members[i])
			if err != nil {
				return err
			}
			out.Samples = append(out.Samples, s)
		}
		out.More = len(list[k].Members) - len(g.Members)
		p.Groups = append(p.Groups, out)
		p.Contents.Samples, p.Contents.SamplesLeftOut = p.Contents.Samples+len(g.Members),
			p.Contents.SamplesLeftOut+out.More
	}
	p.Contents.Groups, p.Contents.GroupsLeftOut = len(shown), len(list)-len(shown)
	return nil
}

// cutGroup returns a copy of a group with its best samples, as many as a page shows of one group.
func cutGroup(g *results.Group) *results.Group {
	c := *g
	c.Members = g.Best()
	c.Members = c.Members[:min(len(c.Members), maxSamples)]
	return &c
}

// groupCost is about how many bytes of the page a group takes, without its images.
func groupCost(g *results.Group) int {
	n := groupBytes + escaped(cut(g.Prompt, maxPrompt)) + escaped(cut(g.Error, maxReason))
	for i := range g.Members {
		m := &g.Members[i]
		n += sampleBytes + escaped(cut(m.Error, maxReason))
		for _, s := range turnsOf(m) {
			n += escaped(s.Text)
		}
		for _, s := range scoresOf(m) {
			n += escaped(s)
		}
		if t := m.Trajectory(); t != nil && t.Image != nil {
			n += escaped(altText(g, m))
		}
	}
	return n
}

// escaped is how many bytes a text takes in HTML.
func escaped(text string) int { return len(template.HTMLEscapeString(text)) }

// newGroup returns what the page says of a group, without its samples.
func newGroup(g *results.Group) group {
	out := group{
		UID: string(g.UID), Prompt: cut(g.Prompt, maxPrompt), Status: g.Status, Error: cut(g.Error, maxReason),
	}
	add := func(name, value string) { out.Facts = append(out.Facts, fact{name, value}) }
	if g.Group != "" {
		add("in place of it", string(g.Group))
	}
	if g.Mean != nil {
		add("mean", results.Number(g.Mean, "%.4f"))
	}
	if g.Std != nil {
		add("std ("+g.StdLabel()+")", results.Number(g.Std, "%.4f"))
	}
	var v versions
	for i := range g.Members {
		v.add(g.Members[i].Trajectory())
	}
	if v.any {
		add("policy version", v.String())
	}
	if !g.Closed.IsZero() {
		add("closed", clock(g.Closed))
	}
	return out
}

// sample returns what the page says of a sample, its image included. An error is of the server.
func (f *fitter) sample(ctx context.Context, g *results.Group, m *view.Member) (sample, error) {
	s := sample{
		Index: m.SampleIndex, Reward: results.Number(m.Reward, "%.4f"), Advantage: results.Number(m.Advantage, "%+.4f"),
		Says: turnsOf(m), Scores: scoresOf(m), Reason: cut(m.Error, maxReason),
	}
	if m.Status != schemas.StatusScored {
		s.Reason = m.Status
		if m.Error != "" {
			s.Reason += ": " + cut(m.Error, maxReason)
		}
	}
	switch {
	case m.Advantage == nil:
	case *m.Advantage > 0:
		s.Tone = "good"
	case *m.Advantage < 0:
		s.Tone = "bad"
	}
	t := m.Trajectory()
	switch {
	case m.Text != nil:
		return s, nil
	case t == nil || t.Image == nil:
		if s.Absent = "no image"; g.Source != "" {
			s.Absent = fmt.Sprintf("in run %s", g.Source)
		}
		return s, nil
	}
	s.Alt = altText(g, m)
	var err error
	s.Image, s.Absent, err = f.image(ctx, t)
	return s, err
}

// altText says in words what image a sample has.
func altText(g *results.Group, m *view.Member) string {
	what := "image"
	if m.Trajectory().Video != nil {
		what = "frame in the middle of the video"
	}
	return fmt.Sprintf("%s of sample %d for the prompt “%s”, reward %s", what, m.SampleIndex, cut(g.Prompt, 80),
		results.Number(m.Reward, "%.4f"))
}

// scoresOf says what each reward function gave a sample, and what it read.
func scoresOf(m *view.Member) (lines []string) {
	for _, s := range m.Scores {
		line := s.Name + " " + results.Number(s.Value, "%.4f")
		switch {
		case s.Detail == "":
		case m.Text != nil:
			line += fmt.Sprintf(", “%s”", s.Detail)
		default:
			line += fmt.Sprintf(", read “%s”", s.Detail)
		}
		if s.Error != "" && s.Error != m.Error {
			line += ": " + cut(s.Error, maxReason)
		}
		lines = append(lines, line)
	}
	return lines
}

// turnsOf returns what was said in a sample that is a text: the answer, or all turns of a conversation. Together they
// have maxAnswer characters at most.
func turnsOf(m *view.Member) (turns []said) {
	if m.Text == nil {
		return nil
	}
	left := maxAnswer
	add := func(who, text string) {
		if left <= 0 {
			return
		}
		turns = append(turns, said{who, cut(text, left)})
		left -= utf8.RuneCountInString(text)
	}
	for _, t := range m.Text.Turns {
		if !t.Generated {
			continue
		}
		add("answer", t.Text)
		if t.Reply != "" {
			add("reply", t.Reply)
		}
	}
	return turns
}

// cut shortens a text to that many characters, and says how many it leaves out.
func cut(text string, most int) string {
	n := utf8.RuneCountInString(text)
	if n <= most {
		return text
	}
	return fmt.Sprintf("%s … (%d characters left out)", string([]rune(text)[:most]), n-most)
}

// clock formats a time for the page.
func clock(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05 UTC") }
