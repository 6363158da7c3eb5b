package command

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/natsd"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/estimate"
	"github.com/meander-rl/meander/services/internal/boot"
)

// estimated is the estimate of prompts from files and flags. It is the value of estimate in --json.
type estimated struct {
	Prompts int `json:"prompts"`
	// Batches are the sizes of batches that are normalised together; none: every group alone.
	Batches []int         `json:"batches"`
	Data    *recordCounts `json:"data"`
	*estimate.Estimate
	facts *estimate.Facts
}

// refusal is the error when no prompt would be accepted; nil: some would. names are the flags behind fields.
func (p *estimated) refusal(names fieldFlags) error {
	if p.Groups > 0 {
		return nil
	}
	var errs []error
	for _, r := range p.Refusals {
		errs = append(errs, fmt.Errorf("%s refused: %s", count(r.Prompts, "prompt"), names.blame(r.Reason)))
	}
	return usage(errors.Join(errs...))
}

// recordCounts is what became of the records.
type recordCounts struct {
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

// factsOf asks a pipeline; nil stands for the one that this process would be.
func factsOf(ctx context.Context, conn *connection, s *services) (*estimate.Facts, error) {
	if s == nil && conn != nil {
		return estimate.Ask(ctx, conn.Bus)
	}
	f := estimate.Unknown()
	if s != nil {
		var err error
		if f, err = estimate.Of(s.Config); err != nil {
			return nil, usage(err)
		}
	}
	if conn != nil {
		return f, f.AskRoom(ctx, conn.Bus)
	}
	if s != nil {
		for _, l := range s.limits.Streams() {
			if l.MaxBytes > 0 {
				f.Room[l.Stream] = estimate.Room{Limit: l.MaxBytes}
			}
		}
	}
	return f, nil
}

// estimate adds up what the prompts take of the pipeline that conn leads to, or that s is.
func (d *datasetFlags) estimate(ctx context.Context, conn *connection, s *services, prompts []prompt) (*estimated, error) {
	f, err := factsOf(ctx, conn, s)
	if err != nil {
		return nil, err
	}
	return d.settle(prompts, f)
}

// settle gives answers to reward functions that only the pipeline knows, and adds up.
func (d *datasetFlags) settle(prompts []prompt, f *estimate.Facts) (*estimated, error) {
	p := &estimated{Prompts: len(prompts), Batches: d.loaded.batches, Data: d.data(), Estimate: estimate.New(f), facts: f}
	if p.Batches == nil {
		p.Batches = []int{}
	}
	for i := range prompts {
		q := &prompts[i]
		name, _ := q.body["model"].(string)
		policy := f.Policy(schemas.Lane(name))
		if policy != nil && policy.Text != nil {
			if err := q.converse(); err != nil {
				return nil, usage(err)
			}
		}
		if q.truth != "" {
			var specs []any
			// With a ground truth, whatever compares has what it needs.
			for _, reward := range f.Rewards(&schemas.Prompt{Prompt: strconv.Quote(q.truth)}, policy) {
				specs = append(specs, map[string]any{"name": reward})
			}
			if specs == nil {
				return nil, usage(fmt.Errorf("prompt %q has a ground truth, and the pipeline has not said which reward function compares: name one with --reward", q.text))
			}
			q.body["reward"] = specs
			q.answer(q.truth)
			q.truth = ""
		}
		data, err := q.encode()
		if err != nil {
			return nil, err
		}
		p.Add(data)
	}
	p.Data.Metadata = metadataOf(prompts)
	if text, err := strconv.QuotedPrefix(p.Reason); err == nil { // of a prompt that it quotes
		p.Reason = text + ": " + d.names.blame(strings.TrimPrefix(p.Reason[len(text):], ": "))
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

func (d *datasetFlags) data() *recordCounts {
	l := d.loaded
	out := &recordCounts{
		File: d.file, Format: string(l.format), Records: l.Records + len(l.bad), Bad: []string{}, TooShort: l.Short, TooLong: l.Long,
		Duplicates: l.Duplicates, Dropped: l.Dropped, Chosen: l.Chosen, Shard: d.shard,
	}
	for _, b := range l.bad {
		out.Bad = append(out.Bad, b.Error())
	}
	return out
}

// shorten cuts a text for a line.
func shorten(s string, most int) string {
	if r := []rune(s); len(r) > most {
		return string(r[:most]) + "..."
	}
	return s
}

// show prints the estimate of what is about to run, and refuses what cannot fit, unless it
// is told not to, or the run goes on with what it began.
func (p *estimated) show(ctx context.Context, conn *connection, run schemas.Run, overfill bool, out io.Writer) error {
	if err := p.print(out); err != nil || overfill {
		return err
	}
	if _, err := conn.Run(ctx, run); err == nil {
		return nil
	}
	return p.mustFit()
}

// mustFit names the streams that the samples are sure to overfill.
func (p *estimated) mustFit() error {
	var errs []error
	for _, s := range p.Overfull() {
		errs = append(errs, fmt.Errorf("%s; give it more with --%s SIZE, or 'meander streams limit'", streamLine(s), boot.SizeFlag(s.Name)))
	}
	if len(errs) == 0 {
		return nil
	}
	return usage(fmt.Errorf("the estimate does not fit, and nothing has been started:\n%w\n--overfill starts all the same, and waits for room when a stream is full", errors.Join(errs...)))
}

// dryRun prints the estimate and does nothing. It asks a pipeline that runs; s is the one
// that this process would be otherwise, nil for none. It starts no server.
func (a *app) dryRun(ctx context.Context, d *datasetFlags, s *services, prompts []prompt, out io.Writer) error {
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
	p, err := d.estimate(ctx, conn, s, prompts)
	if err != nil {
		return err
	}
	if a.json {
		err = json.NewEncoder(out).Encode(map[string]any{"estimate": p})
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
func (p *estimated) print(out io.Writer) error {
	const label = 11 // the longest is advantage
	columns := max(lineWidth(out)-label, 2*label)
	var err error
	line := func(name, format string, args ...any) {
		text := breakLines(fmt.Sprintf(format, args...), columns, "\n"+strings.Repeat(" ", label))
		if _, e := fmt.Fprintf(out, "%-*s%s\n", label, name, text); err == nil {
			err = e // of all lines it is the same
		}
	}
	p.printPrompts(line)
	if p.Texts() {
		printTextCost(p.Estimate, line)
	} else if c := p.Cost; c != nil {
		printCost(c, line)
	} else if p.Groups > 0 {
		line("model", "not announced yet: steps and bytes are its own")
	}
	var parts []string
	for _, s := range p.Streams {
		if s.Name == schemas.StreamSteps || s.Name == bus.BlobStream && s.Bytes > 0 || !s.Fits() { // the others are small
			parts = append(parts, streamLine(s))
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
func (p *estimated) printPrompts(line func(name, format string, args ...any)) {
	what := fmt.Sprintf("%s = %s", count(p.Groups, "group"), count(int(p.Samples), "sample"))
	made := "image"
	if p.Cost != nil && p.ImageBytes+p.ConditioningStored == 0 {
		made = "sample"
	}
	if len(p.GroupSizes) == 1 {
		what = fmt.Sprintf("%s x %s = %s", count(p.Groups, "group"), count(int(p.GroupSizes[0]), "sample"), count(int(p.Samples), made))
	}
	if p.Cost != nil && p.ImageSize != "" {
		what += " of " + p.ImageSize
	}
	if p.Model != "" {
		what += ", by " + p.Model
	}
	line("estimate", "%s", what)
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

// printCost writes the lines of steps and latents.
func printCost(c *estimate.Cost, line func(name, format string, args ...any)) {
	each := ""
	switch n := c.StopStepIndex - c.StartStepIndex; {
	case n < 1 || c.NumInferenceSteps == 0:
	case n < c.NumInferenceSteps:
		each = fmt.Sprintf("%d a sample, from %d to %d of %d, ", n, c.StartStepIndex, c.StopStepIndex, c.NumInferenceSteps)
	default:
		each = fmt.Sprintf("%d a sample, ", n)
	}
	guidance := ""
	if c.TrueCFGScale > 1 {
		guidance = fmt.Sprintf(" (guidance, scale %g)", c.TrueCFGScale)
	}
	line("steps", "%s%s in all, %s stochastic; %s%s", each, thousands(int(c.Steps)), thousands(int(c.Stochastic)), evaluations(c.Evaluations, c.FlatEvaluations), guidance)
	if c.BytesOfSample > 0 && c.LatentsDType != "" && c.LatentsShape != nil {
		checkpoints := ""
		if c.Checkpoints > 0 {
			checkpoints = ", and " + count(int(c.Checkpoints), "checkpoint")
		}
		line("latents", "%s of %s [%d, %d] kept%s; a sample stores %s", count(int(c.LatentsKept), "state"), c.LatentsDType, c.LatentsShape[0], c.LatentsShape[1], checkpoints, size(c.BytesOfSample))
		if c.ConditioningBytes > 0 {
			line("texts", "encoded, at most %s a prompt, stored once: a sample takes at most %s with its part of that, and %s with a copy of its own",
				size(c.ConditioningBytes), size(c.BytesOfSample+c.ConditioningOfSample), size(c.BytesOfSample+c.ConditioningBytes))
		}
	}
}

// printTextCost writes the lines of tokens and logits.
func printTextCost(p *estimate.Estimate, line func(name, format string, args ...any)) {
	c := p.Cost
	line("tokens", "at most %s generated a sample, %s in all", thousands(int(c.Tokens)), thousands(int(c.Evaluations)))
	logits := "none stored; log-probs, log-sum-exps and entropies are"
	if c.LogitsPerToken > 0 {
		logits = fmt.Sprintf("%s of each token in %s, %s", thousands(int(c.LogitsPerToken)), c.LogitsDType, size(c.LogitsBytes))
		if c.LogitsDiffer {
			logits += ", of the prompts that ask for the most"
		}
	}
	if c.BytesOfSample > 0 {
		logits += "; a sample stores at most " + size(c.BytesOfSample)
	}
	line("logits", "%s", logits)
	if p.Large() {
		line("warning", "the run may store %s: --logits topk:20:F16 takes 120 B a token", size(c.StepBytes))
	}
}

// evaluations says how often the model is asked, and how often without the trees.
func evaluations(n, flat int64) string {
	s := count(int(n), "model evaluation")
	if n < flat {
		s += fmt.Sprintf(", %s fewer (%.0f %%) than the %s of samples that share no steps", thousands(int(flat-n)), 100*float64(flat-n)/float64(flat), thousands(int(flat)))
	}
	return s
}

// streamLine is the stream's share, and a warning when it does not fit.
func streamLine(s estimate.Stream) string {
	what := map[string]string{schemas.StreamPrompts: "of prompts", schemas.StreamSteps: "of steps", schemas.StreamTrajectories: "of trajectories", bus.BlobStream: "of images at most"}
	out := fmt.Sprintf("%s %s", size(s.Bytes), what[s.Name])
	switch {
	case s.Limit == 0:
	case !s.Fits() && s.AtMost:
		out += fmt.Sprintf(", PERHAPS MORE THAN FITS: %s has %s free of %s", s.Name, size(max(s.Limit-s.Used, 0)), size(s.Limit))
	case !s.Fits():
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
