package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

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
	if conn == nil && !a.storeExists() {
		f.Tenants = map[schemas.Lineage]int64{} // none
	}
	if conn != nil {
		err = errors.Join(f.AskCapacity(ctx, conn.Bus), f.AskTenants(ctx, conn.Bus))
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
		for i := 0; i < len(prompts) && yield(&prompts[i], nil); i++ {
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
		Chosen: l.Chosen, Shard: d.Shard,
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
func (a *app) dryRun(c *cobra.Command, run schemas.Run, d *promptFlags, s *services, texts []string) error {
	ctx, out := c.Context(), c.OutOrStdout()
	next, stop := iter.Pull2(d.each(texts, c.InOrStdin(), s != nil))
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
	return errors.Join(err, p.mustFit(ctx, conn, run, d.Overfill))
}

// estimateLine writes a line of an estimate: its name, and a text in parts.
type estimateLine func(name string, parts ...string)

// printEstimate writes the estimate for people, with a line for each subject that has something to say.
func (p *estimated) printEstimate(out io.Writer) {
	line := func(name string, parts ...string) {
		if text := strings.Join(parts, ""); text != "" {
			present.Field(out, 11, name, text) // the longest name is advantage
		}
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
	line("storage", strings.Join(parts, "; "))
	if p.Groups > 0 {
		line("reward", strings.Join(p.Reward, "; or "))
		line("advantage", strings.Join(p.Advantage, "; or "))
	}
	line("warning", strings.Join(p.Warnings, "; "))
	line("refused", present.When(p.Refused > 0, "%s, e.g. %s", present.Count(p.Refused, "prompt"), p.Reason))
}

// printPrompts writes with line how many samples are made, and from which prompts.
func (p *estimated) printPrompts(line estimateLine) {
	when, count := present.When, present.Count[int]
	made, frames := "image", int64(0)
	if p.Cost != nil && p.Settings.Frames > 1 {
		made, frames = "video", p.Settings.Frames
	}
	if len(p.Stages) > 0 || p.Cost != nil && p.ImageBytes+p.ConditioningStored == 0 {
		made = "sample"
	}
	what := fmt.Sprintf("%s = %s", count(p.Groups, "group"), present.Count(p.Samples, "sample"))
	if len(p.GroupSizes) == 1 {
		what = fmt.Sprintf("%s x %s = %s", count(p.Groups, "group"), present.Count(p.GroupSizes[0], "sample"),
			present.Count(p.Samples, made))
	}
	if p.Cost != nil && p.ImageSize != "" {
		what += when(frames > 0, " of %s", present.Count(frames, "frame")) + " of " + p.ImageSize
	}
	line("estimate", what, when(p.Model != "", ", by %s", p.Model))
	p.printStages(line)
	d := p.Data
	line("prompts", when(d.Partial, "the first "), count(d.Records, "prompt"),
		when(d.File != "", " %s %s (%s)", map[bool]string{true: "of", false: "in"}[d.Partial], d.File, d.Format),
		when(d.BadCount > 0, ", %d bad left out", d.BadCount), ", ", count(d.Duplicates, "duplicate"),
		when(d.Chosen != p.Prompts || d.Chosen != d.Records, ", %d chosen", d.Chosen),
		when(d.Shard != "", ", shard %s has %d", d.Shard, p.Prompts))
	for i, bad := range d.Bad {
		if i == 5 {
			line("", fmt.Sprintf("and %d more", d.BadCount-i))
			break
		}
		line("", bad)
	}
	n := len(d.Metadata)
	line("metadata", strings.Join(d.Metadata[:min(n, 12)], ", "), when(n > 12, " and %d more", n-12))
	if n := len(p.Batches); n > 0 {
		last := p.Batches[n-1]
		line("batches", fmt.Sprintf("%s of %s", count(n, "batch"), count(p.Batches[0], "group")),
			when(last != p.Batches[0], ", the last of %d", last))
	}
}

// printStages writes with line how many samples of each stage are made, and what they take.
func (p *estimated) printStages(line estimateLine) {
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
	line("", present.Count(len(p.Stages), "stage"), present.When(p.Rounds > 1, " in at most %d rounds", p.Rounds),
		": ", strings.Join(each, ", "))
}

// printCost writes with line what images cost: steps and latents.
func printCost(c *estimate.Cost, line estimateLine) {
	when, size := present.When, present.Size[int64]
	n, all := c.StopStepIndex-c.StartStepIndex, c.NumInferenceSteps
	guidance, guided := "", c.GuidedSteps
	if scale := c.Settings.TrueCFGScale; scale > 1 {
		guidance = fmt.Sprintf(" (guidance, scale %g%s)", scale,
			when(guided > 0 && guided < all, ", in %d steps", guided))
	}
	for _, x := range c.Settings.Extras() {
		guidance += fmt.Sprintf(", %s %s", x[0], x[1])
	}
	line("steps", when(n > 0 && all > 0, "%d a sample, ", n),
		when(n > 0 && n < all, "from %d to %d of %d, ", c.StartStepIndex, c.StopStepIndex, all),
		fmt.Sprintf("%s in all, %s stochastic; ", present.Thousands(c.Steps), present.Thousands(c.Stochastic)),
		evaluations(c.Evaluations, c.FlatEvaluations),
		when(c.PrunedEvaluations > 0, ", up to %s fewer as rewards at a step end samples",
			present.Thousands(c.PrunedEvaluations)), guidance)
	if c.BytesOfSample == 0 || c.Settings.LatentsDType == "" || c.LatentsShape == nil {
		return
	}
	line("latents", fmt.Sprintf("%s of %s [%d, %d] kept", present.Count(c.LatentsKept, "state"),
		c.Settings.LatentsDType, c.LatentsShape[0], c.LatentsShape[1]),
		when(c.Checkpoints > 0, ", and %s", present.Count(c.Checkpoints, "checkpoint")),
		"; a sample stores ", size(c.BytesOfSample))
	line("texts", when(c.ConditioningBytes > 0, "encoded, at most %s a prompt, stored once: a sample takes at most %s "+
		"with its part of that, and %s with a copy of its own", size(c.ConditioningBytes),
		size(c.BytesOfSample+c.ConditioningOfSample), size(c.BytesOfSample+c.ConditioningBytes)))
}

// printTextCost writes with line what texts cost: tokens and logits.
func printTextCost(p *estimate.Estimate, line estimateLine) {
	c, size := p.Cost, present.Size[int64]
	line("tokens", fmt.Sprintf("at most %s generated a sample, %s in all", present.Thousands(c.Tokens),
		present.Thousands(c.Evaluations)))
	logits := "none stored; log-probs, log-sum-exps and entropies are"
	switch {
	case c.LogitsPerToken > 0:
		logits = fmt.Sprintf("%s of each token in %s, %s%s", present.Thousands(c.LogitsPerToken), c.LogitsDType,
			size(c.LogitsBytes), present.When(c.LogitsDiffer, ", of the prompts that ask for the most"))
	case c.DrawnBy != "" && len(c.Numbers) == 0:
		logits = "none stored; which other numbers are is known when " + c.DrawnBy + " answers"
	case c.DrawnBy != "":
		logits = "none stored; " + strings.Join(c.Numbers, ", ") + " are, by " + c.DrawnBy
	}
	line("logits", logits, present.When(c.BytesOfSample > 0, "; a sample stores at most %s", size(c.BytesOfSample)))
	line("warning", present.When(p.Large(), "the run may store %s; --logits topk:20:F16 needs only 120 B a token",
		size(c.StepBytes)))
}

// evaluations says how often the model is evaluated, and how much sharing steps saves. flat is the number without
// sharing.
func evaluations(n, flat int64) string {
	return present.Count(n, "model evaluation") + present.When(n < flat,
		", %s fewer (%.0f %%) than the %s of samples that share no steps", present.Thousands(flat-n),
		100*float64(flat-n)/float64(flat), present.Thousands(flat))
}

// streamLine says how many bytes go to a stream, and warns if they do not fit.
func streamLine(s estimate.Stream) string {
	what := map[string]string{
		schemas.StreamPrompts: "of prompts", schemas.StreamSteps: "of steps",
		schemas.StreamTrajectories: "of trajectories", schemas.StreamBlobBucket: "of images at most",
	}
	free, limit := present.Size(max(s.Limit-s.Used, 0)), present.Size(s.Limit)
	out := fmt.Sprintf("%s %s", present.Size(s.Bytes), what[s.Name])
	switch {
	case s.Limit == 0:
		return out
	case !s.Fits():
		return out + fmt.Sprintf(", %sMORE THAN FITS: %s has %s free of %s", present.When(s.AtMost, "PERHAPS "), s.Name,
			free, limit)
	case s.Used > 0:
		return out + fmt.Sprintf(" (%s free of %s)", free, limit)
	}
	return out + fmt.Sprintf(" (of %s)", limit)
}
