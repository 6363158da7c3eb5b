package command

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/natsd"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/intake"
	"github.com/meander-rl/meander/services/internal/boot"
	"github.com/meander-rl/meander/services/sampler"
)

// plan is everything that follows from the prompts, the model's defaults and the flags,
// before anything runs. It is the value of plan in --json.
type plan struct {
	Prompts int `json:"prompts"`
	// Groups is one per prompt that no rule forbids, Refused counts the others.
	Groups  int    `json:"groups"`
	Refused int    `json:"refused"`
	Reason  string `json:"refused_reason,omitempty"`
	// Warnings are what intake lets be: several where prompts differ.
	Warnings []string `json:"warnings,omitempty"`
	// Batches are the sizes of batches that are normalised together; none: every group alone.
	Batches []int     `json:"batches"`
	Data    *planData `json:"data"`
	Samples int64     `json:"samples"`
	// Model and what depends on its defaults is missing when no model is known.
	Model string `json:"model,omitempty"` // the first prompt's
	*planCost
	// Reward and Advantage are lines for people: several where prompts differ.
	Reward    []string `json:"reward"`
	Advantage []string `json:"advantage"`
	// Streams are what the stored bytes go to, with what is there and the limit.
	Streams []planStream `json:"streams"`

	groupSizes  []int64
	promptBytes int64
}

// planData is what became of the records.
type planData struct {
	File       string   `json:"file,omitempty"`
	Format     string   `json:"format,omitempty"`
	Records    int      `json:"records"`
	Bad        []string `json:"bad"`
	TooShort   int      `json:"too_short"`
	TooLong    int      `json:"too_long"`
	Duplicates int      `json:"duplicates"`
	Dropped    bool     `json:"duplicates_dropped"`
	Chosen     int      `json:"chosen"`
	Shard      string   `json:"shard,omitempty"`
	// Metadata are the names that the records have and prompts do not, sorted.
	Metadata []string `json:"metadata,omitempty"`
}

// planStream is a stream that the samples fill.
type planStream struct {
	Name  string `json:"name"`
	Bytes int64  `json:"bytes"`
	Used  int64  `json:"used"`
	Limit int64  `json:"limit"` // 0: not known
	// AtMost says that Bytes is a bound: what is stored may be much less.
	AtMost bool `json:"at_most,omitempty"`
}

// pipelineFacts is what the other end knows: its models, and how full its streams are.
type pipelineFacts struct {
	policies []*schemas.Policy
	live     []string // lanes that a sampler serves now
	reward   []string // of models that name none
	streams  map[string]planStream
}

// factsOf asks a pipeline; nil stands for the one that this process would be.
func (d *datasetFlags) factsOf(ctx context.Context, conn *connection, s *services) (*pipelineFacts, error) {
	f := &pipelineFacts{streams: map[string]planStream{}}
	if s != nil {
		policy, err := policyOf(s.Sampler)
		if err != nil {
			return nil, usage(err)
		}
		f.policies, f.reward = []*schemas.Policy{policy}, s.Intake.Reward
	}
	if conn == nil {
		for _, spec := range schemas.Streams() {
			f.streams[spec.Name] = planStream{Limit: spec.MaxBytes}
		}
		if s != nil {
			for _, l := range s.limits.Streams() {
				f.streams[l.Stream] = planStream{Limit: cmp.Or(l.MaxBytes, f.streams[l.Stream].Limit)}
			}
		}
		return f, nil
	}
	if s == nil {
		var err error
		if f.policies, err = conn.Policies(ctx); err != nil {
			return nil, err
		}
		present, err := conn.Present(ctx)
		if err != nil {
			return nil, err
		}
		for _, p := range present {
			if p.Service == schemas.ServiceSampler && !slices.Contains(f.live, p.Lane) {
				f.live = append(f.live, p.Lane)
			}
		}
	}
	for _, name := range []string{schemas.StreamPrompts, schemas.StreamSteps, schemas.StreamTrajectories, bus.BlobStream} {
		info, err := conn.StreamInfo(ctx, name)
		if err != nil {
			return nil, fmt.Errorf("limits of %s: %w", name, err)
		}
		f.streams[name] = planStream{Used: int64(info.State.Bytes), Limit: max(info.Config.MaxBytes, 0)}
	}
	return f, nil
}

// policyOf is what a sampler of this process will announce, from the model's files alone.
func policyOf(c sampler.Config) (*schemas.Policy, error) {
	info, err := c.Models.Inspect(c.Model)
	if err != nil {
		return nil, err
	}
	if info.LatentChannels == 0 || info.PixelsPerToken == 0 {
		return nil, fmt.Errorf("model %q: %s", c.Model, strings.Join(info.Problems, "; "))
	}
	return sampler.PolicyOf(info.Card), nil
}

// serves returns the policy of the lane that a prompt goes to, nil when it is not known.
func (f *pipelineFacts) serves(name string) *schemas.Policy {
	switch {
	case name == "" && len(f.live) == 1: // as intake picks it
		name = f.live[0]
	case name == "" && len(f.policies) == 1:
		return f.policies[0]
	}
	i := slices.IndexFunc(f.policies, func(p *schemas.Policy) bool { return p.Lane == name })
	if i < 0 {
		return nil
	}
	return f.policies[i]
}

// rewards are those of a prompt that names none.
func (f *pipelineFacts) rewards(e *schemas.Prompt, p *schemas.Policy) []string {
	if p == nil {
		return f.reward
	}
	return intake.DefaultRewards(e, p.Reward, f.reward)
}

// settle gives answers to reward functions that only the pipeline knows, and plans.
func (d *datasetFlags) settle(prompts []prompt, f *pipelineFacts) (*plan, error) {
	p := &plan{Prompts: len(prompts), Batches: d.loaded.batches, Data: d.data()}
	p.Data.Metadata = metadataOf(prompts)
	if p.Batches == nil {
		p.Batches = []int{}
	}
	for i := range prompts {
		q := &prompts[i]
		name, _ := q.body["model"].(string)
		policy := f.serves(name)
		if q.truth != "" {
			var specs []any
			// With a ground truth, whatever compares has what it needs.
			for _, reward := range f.rewards(&schemas.Prompt{Prompt: strconv.Quote(q.truth)}, policy) {
				specs = append(specs, map[string]any{"name": reward})
			}
			if specs == nil {
				return nil, usage(fmt.Errorf("prompt %q has a ground truth, and the pipeline has not said which reward function compares: name one with --reward", q.text))
			}
			q.body["reward"] = specs
			q.answer(q.truth)
			q.truth = ""
		}
		if err := p.add(q, policy, f); err != nil {
			return nil, err
		}
	}
	p.Streams = []planStream{{Name: schemas.StreamPrompts, Bytes: p.promptBytes}}
	if p.planCost != nil {
		p.Streams = append(p.Streams, planStream{Name: schemas.StreamSteps, Bytes: p.StepBytes},
			planStream{Name: schemas.StreamTrajectories, Bytes: p.TrajectoryBytes}, planStream{Name: bus.BlobStream, Bytes: p.PictureBytes, AtMost: true})
	}
	for i, s := range p.Streams {
		p.Streams[i].Used, p.Streams[i].Limit = f.streams[s.Name].Used, f.streams[s.Name].Limit
	}
	return p, nil
}

// metadataOf are the names of the prompts' metadata, sorted.
func metadataOf(prompts []prompt) []string {
	names := map[string]bool{}
	for _, p := range prompts {
		m, _ := p.body["metadata"].(map[string]any)
		for name := range m {
			names[name] = true
		}
	}
	return sortedKeys(names)
}

func (d *datasetFlags) data() *planData {
	l := d.loaded
	out := &planData{
		File: d.file, Format: string(l.format), Records: l.Records + len(l.bad), Bad: []string{}, TooShort: l.Short, TooLong: l.Long,
		Duplicates: l.Duplicates, Dropped: l.Dropped, Chosen: l.Chosen, Shard: d.shard,
	}
	for _, b := range l.bad {
		out.Bad = append(out.Bad, b.Error())
	}
	return out
}

// add counts one prompt.
func (p *plan) add(q *prompt, policy *schemas.Policy, f *pipelineFacts) error {
	data, err := q.encode()
	if err != nil {
		return err
	}
	p.promptBytes += int64(len(data))
	var e schemas.Prompt
	if err = schemas.Decode(data, &e); err == nil {
		var warnings []string
		warnings, err = e.CheckUnknown(data)
		for _, w := range warnings {
			note(&p.Warnings, w)
		}
		err = errors.Join(err, e.Validate())
	}
	if err == nil {
		err = p.resolve(&e, policy, f)
	}
	if err != nil {
		if p.Refused++; p.Refused == 1 {
			p.Reason = fmt.Sprintf("%q: %s", shorten(q.text, 40), firstLine(err.Error()))
		}
	}
	return nil
}

// resolve counts what intake would make of a valid prompt; without a policy, that of its lane,
// only what does not depend on it is known. The draw of a window needs the run: where its
// steps need not be neighbours, the states kept may be a few more or less.
func (p *plan) resolve(e *schemas.Prompt, policy *schemas.Policy, f *pipelineFacts) error {
	rewards := rewardLine(e, f.rewards(e, policy), policy)
	if e.GroupPolicy != nil {
		schemas.SetDefaults(e.GroupPolicy)
	}
	n, advantage := int64(0), e.Advantage
	if policy == nil {
		if err := intake.Check(e, intake.Origin{Reward: f.reward}); err != nil {
			return err
		}
		schemas.SetDefaults(e)
		n = *e.GroupSize
	} else {
		e.UID = cmp.Or(e.UID, "-") // intake names it
		requests, err := intake.Resolve("-", e, policy, intake.Origin{Created: time.Now(), Reward: f.reward})
		if err != nil {
			return err
		}
		cost, err := costOf(requests[0], policy)
		if err != nil {
			return err
		}
		n, advantage = int64(len(requests)), requests[0].Group.Advantage
		p.Model = policy.Model
		if p.planCost == nil {
			p.planCost = &planCost{}
		}
		p.sum(cost, n)
	}
	p.Groups++
	p.Samples += n
	note(&p.groupSizes, n)
	note(&p.Reward, rewards)
	note(&p.Advantage, advantageLine(&advantage, e.GroupPolicy))
	return nil
}

// note adds a value that is not there yet, as far as a line can show.
func note[T comparable](list *[]T, v T) {
	if len(*list) < 4 && !slices.Contains(*list, v) {
		*list = append(*list, v)
	}
}

// shorten cuts a text for a line.
func shorten(s string, most int) string {
	if r := []rune(s); len(r) > most {
		return string(r[:most]) + "..."
	}
	return s
}

// show prints the plan of what is about to run, and refuses what cannot fit, unless it
// is told not to, or the run goes on with what it began.
func (d *datasetFlags) show(ctx context.Context, conn *connection, s *services, run string, prompts []prompt, out io.Writer) error {
	f, err := d.factsOf(ctx, conn, s)
	if err != nil {
		return err
	}
	p, err := d.settle(prompts, f)
	if err != nil {
		return err
	}
	if err := p.print(out); err != nil || d.overfill {
		return err
	}
	if _, err := conn.Run(ctx, run); err == nil {
		return nil
	}
	return p.mustFit()
}

// mustFit names the streams that the samples are sure to overfill.
func (p *plan) mustFit() error {
	var errs []error
	for _, s := range p.Streams {
		if !s.fits() && !s.AtMost {
			errs = append(errs, fmt.Errorf("%s; give it more with --%s SIZE, or 'meander streams limit'", s, boot.SizeFlag(s.Name)))
		}
	}
	if len(errs) == 0 {
		return nil
	}
	return usage(fmt.Errorf("the plan does not fit, and nothing has been started:\n%w\n--overfill starts all the same, and waits for room when a stream is full", errors.Join(errs...)))
}

// planOnly prints the plan and does nothing. It asks a pipeline that runs; s is the one
// that this process would be otherwise, nil for none. It starts no server.
func (a *app) planOnly(ctx context.Context, d *datasetFlags, s *services, prompts []prompt, out io.Writer) error {
	var conn *connection
	if s != nil {
		joins, err := a.joins(s)
		if err != nil {
			return err
		}
		if joins {
			s = nil
		}
	}
	if _, running := natsd.Running(a.store); running || a.natsURL != "" {
		log, err := a.logger()
		if err != nil {
			return err
		}
		if conn, err = a.connect(ctx, log); err != nil {
			return err
		}
		defer conn.Close()
	}
	f, err := d.factsOf(ctx, conn, s)
	if err != nil {
		return err
	}
	p, err := d.settle(prompts, f)
	if err != nil {
		return err
	}
	if a.json {
		err = json.NewEncoder(out).Encode(map[string]any{"plan": p})
	} else {
		err = p.print(out)
	}
	if p.Groups == 0 {
		err = errors.Join(err, &exitError{status: exitUsage, err: errors.New("every prompt would be refused")})
	}
	return err
}

// print writes the block for people: a line per subject, left out where there is nothing
// to say.
func (p *plan) print(out io.Writer) error {
	const label = 11 // the longest is advantage
	columns := max(lineWidth(out)-label, 2*label)
	var err error
	line := func(name, format string, args ...any) {
		text := breakLines(fmt.Sprintf(format, args...), columns, "\n"+strings.Repeat(" ", label))
		_, e := fmt.Fprintf(out, "%-*s%s\n", label, name, text)
		err = errors.Join(err, e)
	}
	p.printPrompts(line)
	if c := p.planCost; c != nil {
		c.print(line)
	} else if p.Groups > 0 {
		line("model", "not announced yet: steps and bytes are its own")
	}
	var parts []string
	for _, s := range p.Streams {
		if s.Name == schemas.StreamSteps || s.Name == bus.BlobStream || !s.fits() { // the others are small
			parts = append(parts, s.String())
		}
	}
	if len(parts) > 0 {
		line("storage", "%s", strings.Join(parts, "; "))
	}
	if p.Groups > 0 {
		line("reward", "%s", strings.Join(p.Reward, "; or "))
		line("advantage", "%s", strings.Join(p.Advantage, "; or "))
	}
	if len(p.Warnings) > 0 {
		line("warning", "%s", strings.Join(p.Warnings, "; "))
	}
	if p.Refused > 0 {
		line("refused", "%s, e.g. %s", count(p.Refused, "prompt"), p.Reason)
	}
	return err
}

// printPrompts says what is made, and of what.
func (p *plan) printPrompts(line func(name, format string, args ...any)) {
	what := fmt.Sprintf("%s = %s", count(p.Groups, "group"), count(int(p.Samples), "sample"))
	if len(p.groupSizes) == 1 {
		what = fmt.Sprintf("%s x %s = %s", count(p.Groups, "group"), count(int(p.groupSizes[0]), "sample"), count(int(p.Samples), "picture"))
	}
	if p.planCost != nil && p.Pictures != "" {
		what += " of " + p.Pictures
	}
	if p.Model != "" {
		what += ", by " + p.Model
	}
	line("plan", "%s", what)
	d := p.Data
	parts := []string{count(d.Records, "prompt")}
	if d.File != "" {
		parts[0] = fmt.Sprintf("%s in %s (%s)", count(d.Records, "prompt"), d.File, d.Format)
	}
	some := func(n int, format string) {
		if n > 0 {
			parts = append(parts, fmt.Sprintf(format, n))
		}
	}
	some(len(d.Bad), "%d bad left out")
	some(d.TooShort, "%d too short")
	some(d.TooLong, "%d too long")
	kept := ""
	if d.Duplicates > 0 {
		kept = " kept"
		if d.Dropped {
			kept = " left out"
		}
	}
	parts = append(parts, count(d.Duplicates, "duplicate")+kept)
	if d.Chosen != p.Prompts || d.Chosen != d.Records {
		parts = append(parts, fmt.Sprintf("%d chosen", d.Chosen))
	}
	if d.Shard != "" {
		parts = append(parts, fmt.Sprintf("shard %s has %d", d.Shard, p.Prompts))
	}
	line("prompts", "%s", strings.Join(parts, ", "))
	for i, bad := range d.Bad {
		if i == 5 {
			line("", "and %d more", len(d.Bad)-i)
			break
		}
		line("", "%s", bad)
	}
	if n := len(d.Metadata); n > 0 {
		names := strings.Join(d.Metadata[:min(n, 12)], ", ")
		if n > 12 {
			names += fmt.Sprintf(" and %d more", n-12)
		}
		line("metadata", "%s", names)
	}
	if n := len(p.Batches); n > 0 {
		sizes := fmt.Sprintf("%s of %s", count(n, "batch"), count(p.Batches[0], "group"))
		if last := p.Batches[n-1]; last != p.Batches[0] {
			sizes += fmt.Sprintf(", the last of %d", last)
		}
		line("batches", "%s", sizes)
	}
}

// fits says whether the stream has room, as far as its limit is known.
func (s planStream) fits() bool { return s.Limit == 0 || s.Used+s.Bytes <= s.Limit }

// String is the stream's share, and a warning when it does not fit.
func (s planStream) String() string {
	what := map[string]string{schemas.StreamPrompts: "of prompts", schemas.StreamSteps: "of steps", schemas.StreamTrajectories: "of trajectories", bus.BlobStream: "of pictures at most"}
	out := fmt.Sprintf("%s %s", size(s.Bytes), what[s.Name])
	switch {
	case s.Limit == 0:
	case !s.fits() && s.AtMost:
		out += fmt.Sprintf(", PERHAPS MORE THAN FITS: %s has %s free of %s", s.Name, size(max(s.Limit-s.Used, 0)), size(s.Limit))
	case !s.fits():
		out += fmt.Sprintf(", MORE THAN FITS: %s has %s free of %s", s.Name, size(max(s.Limit-s.Used, 0)), size(s.Limit))
	case s.Used > 0:
		out += fmt.Sprintf(" (%s free of %s)", size(s.Limit-s.Used), size(s.Limit))
	default:
		out += fmt.Sprintf(" (of %s)", size(s.Limit))
	}
	return out
}

// count is a number of things.
func count(n int, thing string) string {
	switch {
	case n == 1:
		return "1 " + thing
	case strings.HasSuffix(thing, "ch"):
		return thousands(n) + " " + thing + "es"
	}
	return thousands(n) + " " + thing + "s"
}
