package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"strconv"
	"strings"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/natsd"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/estimate"
	"github.com/meander-rl/meander/services/internal/boot"
	"github.com/meander-rl/meander/services/internal/present"
)

// estimated is the value of "estimate" in --json.
type estimated struct {
	Prompts int `json:"prompts"`
	// Batches are the sizes, in groups, of the batches that are normalised together; empty: every group is alone.
	Batches []int         `json:"batches"`
	Data    *recordCounts `json:"data"`
	*estimate.Estimate
	facts *estimate.Facts
}

// refusalError returns a usage error if no prompt would be accepted, else nil. names maps fields of prompts to flags.
func (p *estimated) refusalError(names fieldFlags) error {
	if p.Groups > 0 {
		return nil
	}
	var errs []error
	for _, r := range p.Refusals {
		errs = append(errs, fmt.Errorf("%s refused: %s", present.Count(r.Prompts, "prompt"), names.nameFlags(r.Reason)))
	}
	return usage(errors.Join(errs...))
}

type recordCounts struct {
	File    string `json:"file,omitempty"`
	Format  string `json:"format,omitempty"`
	Records int    `json:"records"`
	// Partial says that the rest of the file was not read, since it could not be chosen.
	Partial bool `json:"partial,omitempty"`
	// Bad lists the first of BadCount bad records.
	Bad        []string `json:"bad"`
	BadCount   int      `json:"bad_count"`
	Duplicates int      `json:"duplicates"`
	Chosen     int      `json:"chosen"`
	Shard      string   `json:"shard,omitempty"`
	// Metadata are the names in records that are not fields of a prompt, sorted.
	Metadata []string `json:"metadata,omitempty"`
}

// factsOf returns what is known of a pipeline, for an estimate: of the running one behind conn if s is nil, else of
// the one that this process would run with s, on a new store if there is no conn. Both may be nil. An unknown model is
// a usage error.
func (a *app) factsOf(ctx context.Context, conn *connection, s *services) (*estimate.Facts, error) {
	if s == nil && conn != nil {
		return estimate.FromServer(ctx, conn.Bus)
	}
	f := estimate.Unknown()
	if s == nil {
		return f, nil
	}
	if err := a.fetchOwn(ctx, s); err != nil {
		return nil, err
	}
	f, err := estimate.FromConfig(ctx, s.Config)
	if err != nil {
		return nil, usage(err)
	}
	if conn != nil {
		err = f.AskCapacity(ctx, conn.Bus)
	} else if storage, e := natsd.NewStorage(a.store); e == nil { // else the run says what is wrong with the store
		for name, limit := range bus.NewLimits(storage) {
			f.Capacity[name] = estimate.StreamCapacity{Limit: limit}
		}
	}
	for _, l := range s.limits.Streams() { // run sets them before it looks
		if l.MaxBytes > 0 {
			f.Capacity[l.Stream] = estimate.StreamCapacity{Used: f.Capacity[l.Stream].Used, Limit: l.MaxBytes}
		}
	}
	return f, err
}

// estimate adds up what the prompts need in the pipeline behind conn, or in the one that s would be.
func (a *app) estimate(
	ctx context.Context, d *datasetFlags, conn *connection, s *services, prompts []prompt,
) (*estimated, error) {
	f, err := a.factsOf(ctx, conn, s)
	if err != nil {
		return nil, err
	}
	return d.addPrompts(func(yield func(*prompt, error) bool) {
		for i := range prompts {
			if !yield(&prompts[i], nil) {
				return
			}
		}
	}, f)
}

// addPrompts completes the prompts with what only the pipeline knows (conversations of language models, which reward
// function gets the ground truth), and estimates what they need. What cannot be completed is a usage error; a prompt
// that intake would refuse is counted.
func (d *datasetFlags) addPrompts(prompts iter.Seq2[*prompt, error], f *estimate.Facts) (*estimated, error) {
	p := &estimated{Estimate: estimate.New(f), facts: f}
	metadata := map[string]bool{}
	for q, err := range prompts {
		if err != nil {
			return nil, err
		}
		p.Prompts++
		name, _ := q.body["model"].(string)
		policy := f.Policy(schemas.Lane(name))
		if policy != nil && policy.Text != nil {
			if err := q.useMessages(); err != nil {
				return nil, usage(err)
			}
		}
		if q.truth != nil {
			var specs []any
			// A quoted ground truth satisfies every reward function that compares.
			for _, reward := range f.Rewards(&schemas.Prompt{Prompt: strconv.Quote(fmt.Sprint(q.truth))}, policy) {
				specs = append(specs, map[string]any{"name": reward})
			}
			if specs == nil {
				return nil, usage(fmt.Errorf("prompt %q has a ground truth, but the pipeline does not say which "+
					"reward function uses it; name one with --reward", q.text))
			}
			q.body["reward"] = specs
			q.setGroundTruth(q.truth)
			q.truth = nil
		}
		data, err := q.encode()
		if err != nil {
			return nil, err
		}
		p.Add(data)
		named, _ := q.body["metadata"].(map[string]any)
		for name := range named {
			metadata[name] = true
		}
	}
	p.Data, p.Batches = d.counts(), append([]int{}, d.loaded.batches...)
	p.Data.Metadata = sortedKeys(metadata)
	if text, err := strconv.QuotedPrefix(p.Reason); err == nil { // it begins with the quoted prompt
		p.Reason = text + ": " + d.names.nameFlags(strings.TrimPrefix(p.Reason[len(text):], ": "))
	}
	return p, nil
}

// counts returns what happened to the records of the data set: how many were bad, left out or chosen.
func (d *datasetFlags) counts() *recordCounts {
	l := d.loaded
	out := &recordCounts{
		File: d.fileName(), Records: l.Records, Partial: l.Partial, Bad: []string{}, Duplicates: l.Duplicates,
		Chosen: l.Chosen, Shard: d.shard,
	}
	if r := l.reader; r != nil {
		out.Format, out.BadCount = string(r.Format), r.Skipped
		out.Records += r.Skipped
		for _, b := range r.Bad {
			out.Bad = append(out.Bad, b.Error())
		}
	}
	return out
}

// printAndCheck prints the estimate of a run that is about to start. A run that cannot fit into the streams is a
// usage error, unless overfill is set or the run is resumed.
func (p *estimated) printAndCheck(
	ctx context.Context, conn *connection, run schemas.Run, overfill bool, out io.Writer,
) error {
	p.printEstimate(out)
	return p.mustFit(ctx, conn, run, overfill)
}

// mustFit returns a usage error with the streams that the samples will certainly overfill; nil if there are none, with
// overfill, or if the run is resumed. conn may be nil.
func (p *estimated) mustFit(ctx context.Context, conn *connection, run schemas.Run, overfill bool) error {
	if overfill {
		return nil
	}
	if conn != nil {
		if _, err := conn.Run(ctx, run); err == nil {
			return nil
		}
	}
	var errs []error
	for _, s := range p.Overfull() {
		errs = append(errs, fmt.Errorf("%s; raise the limit with --%s SIZE or 'meander streams limit'", streamLine(s),
			boot.SizeFlag(s.Name)))
	}
	if len(errs) == 0 {
		return nil
	}
	return usage(fmt.Errorf("the estimate does not fit; nothing was started:\n%w\nWith --overfill the run starts "+
		"anyway, and waits while a stream is full", errors.Join(errs...)))
}

// dryRun prints the estimate of a run and does nothing else. It holds few of the prompts at a time. It asks a running
// pipeline, else the one that this process would run with s (nil: none) on the store, which it does not make. A usage
// error: every prompt would be refused, or the samples do not fit.
func (a *app) dryRun(
	ctx context.Context, run schemas.Run, d *datasetFlags, s *services, prompts iter.Seq2[*prompt, error],
	out io.Writer,
) error {
	next, stop := iter.Pull2(prompts)
	defer stop()
	q, err, there := next() // what is wrong with the flags is said first
	if err != nil {
		return err
	}
	var first []prompt
	one := func(yield func(*prompt, error) bool) {
		for ; there && yield(q, err); q, err, there = next() {
			if len(first) < mostAsked {
				first = append(first, *q)
			}
		}
	}
	var conn *connection
	if s != nil {
		joins, err := a.joinsPipeline(s)
		if err != nil {
			return err
		}
		if joins {
			s = nil
		}
	}
	_, running := natsd.Running(a.store)
	if running || a.nats.URL != "" || s != nil && a.storeExists() {
		var err error
		if conn, err = a.connect(ctx, a.logger()); err != nil {
			return err
		}
		defer conn.Close()
	}
	f, err := a.factsOf(ctx, conn, s)
	if err != nil {
		return err
	}
	p, err := d.addPrompts(one, f)
	if err != nil {
		return err
	}
	if conn != nil && s == nil {
		if err := p.askIntake(ctx, conn, run, first); err != nil {
			return err
		}
	}
	if a.json {
		err = encode(out, map[string]any{"estimate": p})
	} else {
		p.printEstimate(out)
	}
	if p.Groups == 0 {
		return errors.Join(err, &exitError{status: exitUsage, err: errors.New("every prompt would be refused")})
	}
	return errors.Join(err, p.mustFit(ctx, conn, run, d.overfill))
}

// printEstimate writes the estimate for people, with a line for each subject that has something to say.
func (p *estimated) printEstimate(out io.Writer) {
	line := func(name, format string, args ...any) {
		present.Field(out, 11, name, fmt.Sprintf(format, args...)) // the longest name is advantage
	}
	p.printPrompts(line)
	if p.Texts() {
		printTextCost(p.Estimate, line)
	} else if c := p.Cost; c != nil {
		printCost(c, line)
	} else if p.Groups > 0 && len(p.Stages) == 0 {
		line("model", "not announced yet, so steps and bytes are not known")
	}
	var parts []string
	for _, s := range p.Streams {
		// the others are small
		if s.Name == schemas.StreamSteps || s.Name == schemas.StreamBlobBucket && s.Bytes > 0 || !s.Fits() {
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
		line("refused", "%s, e.g. %s", present.Count(p.Refused, "prompt"), p.Reason)
	}
}

// printPrompts writes with line how many samples are made, and from which prompts.
func (p *estimated) printPrompts(line func(name, format string, args ...any)) {
	what := fmt.Sprintf("%s = %s", present.Count(p.Groups, "group"), present.Count(p.Samples, "sample"))
	made := "image"
	if p.Cost != nil && p.Settings.Frames > 1 {
		made = "video"
	}
	if len(p.Stages) > 0 || p.Cost != nil && p.ImageBytes+p.ConditioningStored == 0 {
		made = "sample"
	}
	if len(p.GroupSizes) == 1 {
		what = fmt.Sprintf("%s x %s = %s", present.Count(p.Groups, "group"), present.Count(p.GroupSizes[0], "sample"),
			present.Count(p.Samples, made))
	}
	if p.Cost != nil && p.ImageSize != "" {
		if p.Settings.Frames > 1 {
			what += " of " + present.Count(p.Settings.Frames, "frame")
		}
		what += " of " + p.ImageSize
	}
	if p.Model != "" {
		what += ", by " + p.Model
	}
	line("estimate", "%s", what)
	p.printStages(line)
	d := p.Data
	parts := []string{present.Count(d.Records, "prompt")}
	if d.File != "" {
		parts[0] = fmt.Sprintf("%s in %s (%s)", present.Count(d.Records, "prompt"), d.File, d.Format)
	}
	if d.Partial {
		parts[0] = fmt.Sprintf("the first %s of %s (%s)", present.Count(d.Records, "prompt"), d.File, d.Format)
	}
	if d.BadCount > 0 {
		parts = append(parts, fmt.Sprintf("%d bad left out", d.BadCount))
	}
	parts = append(parts, present.Count(d.Duplicates, "duplicate"))
	if d.Chosen != p.Prompts || d.Chosen != d.Records {
		parts = append(parts, fmt.Sprintf("%d chosen", d.Chosen))
	}
	if d.Shard != "" {
		parts = append(parts, fmt.Sprintf("shard %s has %d", d.Shard, p.Prompts))
	}
	line("prompts", "%s", strings.Join(parts, ", "))
	for i, bad := range d.Bad {
		if i == 5 {
			line("", "and %d more", d.BadCount-i)
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
		sizes := fmt.Sprintf("%s of %s", present.Count(n, "batch"), present.Count(p.Batches[0], "group"))
		if last := p.Batches[n-1]; last != p.Batches[0] {
			sizes += fmt.Sprintf(", the last of %d", last)
		}
		line("batches", "%s", sizes)
	}
}

// printStages writes with line how many samples of each stage are made, and what they take.
func (p *estimated) printStages(line func(name, format string, args ...any)) {
	if len(p.Stages) == 0 {
		return
	}
	each := make([]string, len(p.Stages))
	for i, s := range p.Stages {
		each[i] = fmt.Sprintf("%s %d", s.Name, s.Samples)
		switch {
		case s.Cost == nil:
		case s.Tokens > 0:
			each[i] += fmt.Sprintf(" of at most %s", present.Count(s.Tokens, "token"))
		default:
			each[i] += fmt.Sprintf(" of %s (%s in all)", s.ImageSize, present.Count(s.Steps, "step"))
		}
	}
	within := ""
	if p.Rounds > 1 {
		within = fmt.Sprintf(" in at most %d rounds", p.Rounds)
	}
	line("", "%s%s: %s", present.Count(len(p.Stages), "stage"), within, strings.Join(each, ", "))
}

// printCost writes with line what images cost: steps and latents.
func printCost(c *estimate.Cost, line func(name, format string, args ...any)) {
	each := ""
	switch n := c.StopStepIndex - c.StartStepIndex; {
	case n < 1 || c.NumInferenceSteps == 0:
	case n < c.NumInferenceSteps:
		each = fmt.Sprintf("%d a sample, from %d to %d of %d, ", n, c.StartStepIndex, c.StopStepIndex,
			c.NumInferenceSteps)
	default:
		each = fmt.Sprintf("%d a sample, ", n)
	}
	guidance := ""
	if scale := c.Settings.TrueCFGScale; scale > 1 {
		guidance = fmt.Sprintf(" (guidance, scale %g", scale)
		if n := c.GuidedSteps; n > 0 && n < c.NumInferenceSteps {
			guidance += fmt.Sprintf(", in %d steps", n)
		}
		guidance += ")"
	}
	for _, x := range c.Settings.Extras() {
		guidance += fmt.Sprintf(", %s %s", x[0], x[1])
	}
	line("steps", "%s%s in all, %s stochastic; %s%s", each, present.Thousands(c.Steps), present.Thousands(c.Stochastic),
		evaluations(c.Evaluations, c.FlatEvaluations), guidance)
	if c.BytesOfSample > 0 && c.Settings.LatentsDType != "" && c.LatentsShape != nil {
		checkpoints := ""
		if c.Checkpoints > 0 {
			checkpoints = ", and " + present.Count(c.Checkpoints, "checkpoint")
		}
		line("latents", "%s of %s [%d, %d] kept%s; a sample stores %s", present.Count(c.LatentsKept, "state"),
			c.Settings.LatentsDType, c.LatentsShape[0], c.LatentsShape[1], checkpoints, present.Size(c.BytesOfSample))
		if c.ConditioningBytes > 0 {
			line("texts",
				"encoded, at most %s a prompt, stored once: a sample takes at most %s with its part of that, and %s "+
					"with a copy of its own", present.Size(c.ConditioningBytes),
				present.Size(c.BytesOfSample+c.ConditioningOfSample),
				present.Size(c.BytesOfSample+c.ConditioningBytes))
		}
	}
}

// printTextCost writes with line what texts cost: tokens and logits.
func printTextCost(p *estimate.Estimate, line func(name, format string, args ...any)) {
	c := p.Cost
	line("tokens", "at most %s generated a sample, %s in all", present.Thousands(c.Tokens),
		present.Thousands(c.Evaluations))
	logits := "none stored; log-probs, log-sum-exps and entropies are"
	switch {
	case c.DrawnBy != "" && len(c.Numbers) == 0:
		logits = "none stored; which other numbers are is known when " + c.DrawnBy + " answers"
	case c.DrawnBy != "":
		logits = "none stored; " + strings.Join(c.Numbers, ", ") + " are, by " + c.DrawnBy
	}
	if c.LogitsPerToken > 0 {
		logits = fmt.Sprintf("%s of each token in %s, %s", present.Thousands(c.LogitsPerToken), c.LogitsDType,
			present.Size(c.LogitsBytes))
		if c.LogitsDiffer {
			logits += ", of the prompts that ask for the most"
		}
	}
	if c.BytesOfSample > 0 {
		logits += "; a sample stores at most " + present.Size(c.BytesOfSample)
	}
	line("logits", "%s", logits)
	if p.Large() {
		line("warning", "the run may store %s; --logits topk:20:F16 needs only 120 B a token",
			present.Size(c.StepBytes))
	}
}

// evaluations says how often the model is evaluated, and how much sharing steps saves. flat is the number without
// sharing.
func evaluations(n, flat int64) string {
	s := present.Count(n, "model evaluation")
	if n < flat {
		s += fmt.Sprintf(", %s fewer (%.0f %%) than the %s of samples that share no steps", present.Thousands(flat-n),
			100*float64(flat-n)/float64(flat), present.Thousands(flat))
	}
	return s
}

// streamLine says how many bytes go to a stream, and warns if they do not fit.
func streamLine(s estimate.Stream) string {
	what := map[string]string{
		schemas.StreamPrompts: "of prompts", schemas.StreamSteps: "of steps",
		schemas.StreamTrajectories: "of trajectories", schemas.StreamBlobBucket: "of images at most",
	}
	out := fmt.Sprintf("%s %s", present.Size(s.Bytes), what[s.Name])
	switch {
	case s.Limit == 0:
	case !s.Fits() && s.AtMost:
		out += fmt.Sprintf(", PERHAPS MORE THAN FITS: %s has %s free of %s", s.Name,
			present.Size(max(s.Limit-s.Used, 0)), present.Size(s.Limit))
	case !s.Fits():
		out += fmt.Sprintf(", MORE THAN FITS: %s has %s free of %s", s.Name, present.Size(max(s.Limit-s.Used, 0)),
			present.Size(s.Limit))
	case s.Used > 0:
		out += fmt.Sprintf(" (%s free of %s)", present.Size(s.Limit-s.Used), present.Size(s.Limit))
	default:
		out += fmt.Sprintf(" (of %s)", present.Size(s.Limit))
	}
	return out
}
