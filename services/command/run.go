package command

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/export"
	"github.com/meander-rl/meander/pkg/fields"
	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/present"
	"github.com/meander-rl/meander/services/reward"
	"github.com/meander-rl/meander/services/sampler/models"
)

// runCommand makes the command 'meander run'.
func runCommand(a *app) *cobra.Command {
	r := &runner{app: a, services: defaultServices()}
	c := &cobra.Command{
		Use:   "run [PROMPT ...]",
		Args:  quotedPrompts,
		Short: "make rollouts for prompts, wait, and print rewards and advantages",
		Long: `run sends prompts through the pipeline and waits for the results. It shows a progress bar, then a
table of groups with rewards and advantages. It writes a folder with the images, a contact sheet for
each group, and results.jsonl.

If no pipeline runs (no --nats, none on the store), run is the whole pipeline itself. Every event is
stored at once: after a crash, the same command with the same --run and --store continues where it
stopped. The same --run with other prompts or another model is refused.

Ctrl-C asks: leave the run or cancel it? A run that is left continues in the pipeline that serves it,
or waits for the same command. A second Ctrl-C cancels the run, a third one ends the process. SIGTERM,
SIGHUP, and Ctrl-C without a terminal leave the run.

Exit status: 0 all groups are complete, 1 some are not, 2 wrong usage or every prompt was refused.`,
		Example: `  meander run 'a red sign that says "OPEN"' 'a blue sign that says "4071"'
  meander run --group-size 8 --sde-steps 2,3 --return-steps 2,3,4 --json 'a red sign that says "OPEN"'
  meander run --model DIR --reward jpeg_compressibility "a red fox"    # a checkpoint of your own
  meander run --model ORG/NAME@REVISION --reward jpeg_compressibility "a red fox"    # one of the Hugging Face Hub
  meander run --prompts prompts.txt --group-size 16 --sde-window 2:0-5 --latents-dtype F16
  meander run --prompts words.csv --template 'a {colour} sign that says "{prompt}"' --dry-run
  meander run --run night --prompts prompts.jsonl        # the same again after a crash: it resumes`,
		RunE: func(c *cobra.Command, texts []string) error {
			if err := r.check(); err != nil {
				return err
			}
			if err := r.fetchPrompts(c.Context(), &r.prompts.datasetFlags); err != nil {
				return err
			}
			r.stdin = c.InOrStdin()
			return r.start(c, texts)
		},
	}
	addSection(c.Flags(), outputSection, func(f *pflag.FlagSet) { r.output(f, "out", "save_latents") })
	r.prompts.addFlags(c.Flags())
	addSection(c.Flags(), pipelineSection, func(f *pflag.FlagSet) { pipelineFlags(f, &r.services) })
	addSection(c.Flags(), limitSection, r.services.limits.Flags)
	return c
}

// start runs the prompts of the command line and of the file, or prints what they would take.
func (r *runner) start(c *cobra.Command, texts []string) error {
	if r.prompts.DryRun {
		return r.dryRun(c, r.id, &r.prompts, &r.services, texts)
	}
	prompts, err := r.prompts.load(texts, c.InOrStdin(), true)
	if err != nil {
		return err
	}
	return r.run(c.Context(), prompts, c.OutOrStdout(), c.ErrOrStderr())
}

func (r *runner) output(f *pflag.FlagSet, flags ...string) {
	nameFlag(f, &r.id, "run", "", "run id; the same id again resumes the run; default a new id")
	fields.Bind("", r).Register(f, flags...)
}

// runner is one run command, or one scheduled command.
type runner struct {
	*app
	prompts  promptFlags
	services services
	id       schemas.Run
	Out      string `key:"out" help:"folder for images, contact sheets and results.jsonl; default meander-out/<run>; - for none"`

	SaveLatents string   `key:"save_latents" help:"write all kept states to this safetensors file, packed [n, S, C], F32"`
	warned      []string // by the estimate
	stdin       io.Reader

	// given are the prompts, with is what they are started with, bySeq are their uids by stream sequence: the dead
	// letter of a refused prompt names its sequence.
	given    []prompt
	with     *started
	outcomes *results.Outcomes
	bySeq    map[uint64]schemas.UID
	// beside is a run that is made at the same time; nil: none is.
	beside *runner
}

// all returns the run, and that beside it.
func (r *runner) all() []*runner {
	if r.beside == nil {
		return []*runner{r}
	}
	return []*runner{r, r.beside}
}

// left is how many prompts have no outcome yet.
func (r *runner) left() (n int) {
	for _, r := range r.all() {
		n += r.outcomes.Left()
	}
	return n
}

// refills is how many fresh groups came in place of those that were given up.
func (r *runner) refills() (n int) {
	for _, r := range r.all() {
		n += r.outcomes.Refills()
	}
	return n
}

func (r *runner) folder() string { return outFolder(r.Out, r.id) }

// check makes a run id if none was given, and checks the settings of the services.
func (r *runner) check() error {
	if r.id == "" {
		unique := strings.ToLower(rand.Text()[:6]) // and sorted by time
		r.id = schemas.Run("r" + time.Now().UTC().Format("20060102-150405") + "-" + unique)
	}
	r.services.loading.lines.Store(&r.stderr)
	r.services.Sampler.Waiting = r.services.loading.wait
	return r.services.validate()
}

// run publishes the prompts, waits for their groups, and prints the results. It serves the pipeline itself if none
// runs. A run that is interrupted can be continued by the same command, which the error says.
func (r *runner) run(ctx context.Context, prompts []prompt, stdout, stderr io.Writer) error {
	log := r.logger()
	r.given = prompts
	r.services.Sampler.Spare = &models.Spare{}
	defer r.services.Sampler.Spare.Close()
	plan, err := r.estimateOwn(ctx, prompts)
	if err != nil {
		return err
	}
	conn, err := r.connectServing(ctx, &r.services, log)
	if err != nil {
		return err
	}
	defer conn.Close()
	own, err := r.checkAndEstimate(ctx, conn, plan, stderr)
	if err != nil {
		return err
	}

	if err := errors.Join(tryFolder("--out", r.folder()), tryFile("--save-latents", r.SaveLatents)); err != nil {
		return usage(err)
	}
	began := time.Now()
	// The services end with the run, or when it fails; a service that fails ends the run.
	work, stop := context.WithCancelCause(context.WithoutCancel(ctx))
	choice, done := r.onInterrupt(ctx, conn, stderr, stop)
	defer done()
	served := make(chan error, 1)
	go func() {
		err := conn.serveWhenOwner(work, func(ctx context.Context) error { return r.services.serve(ctx, conn, log) })
		if err != nil {
			stop(err)
		}
		served <- err
	}()
	err = r.publishAndWait(work, conn, own, choice, stderr, log)
	stop(nil)
	serveErr := <-served
	switch {
	case errors.Is(context.Cause(work), errLeft) && err != nil && !conn.serves():
		return fmt.Errorf("left; run %s continues at %s: see 'meander status %s', or come back with: meander run "+
			"--run %s and the same prompts", r.id, conn.where, r.id, r.id)
	case errors.Is(context.Cause(work), errLeft) && err != nil:
		return fmt.Errorf("interrupted; continue with: meander run --run %s --store %s and the same prompts", r.id,
			r.store)
	case serveErr != nil && err != nil:
		return r.pipelineError(serveErr)
	case err != nil:
		return err
	}
	for _, r := range r.all() {
		err = cmp.Or(err, r.report(context.WithoutCancel(ctx), conn, time.Since(began), stdout, stderr))
	}
	if serveErr == nil {
		return err
	}
	serveErr = r.pipelineError(serveErr) // of a service that failed while it ended, when all results were there
	if err != nil {
		present.PrintEscaped(stderr, "meander: "+serveErr.Error())
		return err
	}
	return serveErr
}

// estimateOwn returns the estimate if this process will serve the pipeline, and nil if another one does. So a refusal
// of all prompts, a usage error, is known before anything starts.
func (r *runner) estimateOwn(ctx context.Context, prompts []prompt) (*estimated, error) {
	joins, err := r.joinsPipeline(&r.services)
	if err != nil || joins {
		return nil, err
	}
	plan, err := r.estimate(ctx, &r.prompts.datasetFlags, nil, &r.services, prompts)
	if err == nil {
		err = plan.refusalError(r.prompts.names)
	}
	return plan, err
}

// checkAndEstimate prints the estimate, and refuses what cannot run, before prompts are published. own are the
// services of this process, nil if another process serves. A refusal is a usage error.
func (r *runner) checkAndEstimate(ctx context.Context, conn *connection, plan *estimated, stderr io.Writer,
) (own *services, err error) {
	if err := r.services.limits.Apply(ctx, conn.Bus); err != nil {
		return nil, err
	}
	if err := r.services.validate(); err != nil { // again: settings were adopted from a running pipeline
		return nil, err
	}
	if conn.member != nil {
		// Refuse unknown rewards now, not after the samples are made.
		if err := reward.CheckNames(r.services.Reward, rewardNames(r.given)); err != nil {
			return nil, usage(err)
		}
	}
	if conn.serves() {
		own = &r.services
	} else {
		fmt.Fprintf(stderr, "joining the pipeline at %s\n", conn.where)
	}
	if plan != nil && own != nil {
		err = plan.AskCapacity(ctx, conn.Bus)
	} else if plan, err = r.estimate(ctx, &r.prompts.datasetFlags, conn, own, r.given); err == nil {
		err = plan.refusalError(r.prompts.names)
	}
	if err == nil {
		r.warned = plan.Warnings
		err = plan.printAndCheck(ctx, conn, r.id, r.prompts.Overfill, stderr)
	}
	if err != nil {
		return nil, err
	}
	if r.SaveLatents != "" && plan.Texts() {
		return nil, usage(errors.New("--save-latents: given; must be absent: texts have no latents. " +
			"Their logits are in their events (--logits)"))
	}
	for _, run := range r.all() {
		var before *started
		run.services = r.services
		if run.with, before, err = run.startedWith(ctx, conn, run.given, plan); err != nil {
			return nil, err
		}
		if own == nil {
			continue
		}
		if own.Intake.Own = append(own.Intake.Own, run.id); before != nil {
			own.Sampler.BaseDigest = before.BaseDigest
		}
	}
	return own, nil
}

// publishAndWait publishes the prompts without an outcome and waits until every group has one, while it shows the
// progress. own are the services of this process, nil if another process serves. An error is of the server, of a run
// that was started with something else, or the cause of ctx.
func (r *runner) publishAndWait(ctx context.Context, conn *connection, own *services, choice *interrupt,
	stderr io.Writer, log zerolog.Logger,
) error {
	for _, r := range r.all() {
		r.outcomes = results.NewOutcomes(r.wanted())
		if err := r.outcomes.Read(ctx, conn.Bus, r.id); err != nil {
			return err
		}
		if done := len(r.given) - r.outcomes.Left(); done > 0 {
			fmt.Fprintf(stderr, "run %s: %d of %d groups are done already, resuming\n", r.id, done, len(r.given))
		}
	}

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	progress := newProgress(stderr, r.json, r.id, r.wanted(), r.outcomes, r.services.loading)
	if r.beside != nil {
		progress.addRun(r.beside.id, r.beside.wanted(), r.beside.outcomes)
	}
	defer progress.end()
	progress.countEvents(ctx, conn.Bus)
	var watching sync.WaitGroup
	defer watching.Wait()
	defer cancel()
	watching.Go(func() { progress.explainWaits(ctx, conn.Bus, explainAfter) })
	watching.Go(func() { watchFaults(ctx, conn.Bus, progress.note) })
	for i, r := range r.all() {
		watching.Go(func() { watchControl(ctx, conn.Bus, r.id, progress, choice.runs[i].cancelled) })
	}
	note := progress.note
	choice.printLine.Store(&note)
	inbox := conn.Conn().NewInbox()
	receipts, err := conn.Conn().Subscribe(inbox, progress.receiptHandler(r.warned))
	if err != nil {
		return fmt.Errorf("subscribe to receipts: %w", err)
	}
	defer func() { _ = receipts.Unsubscribe() }()
	base := ""
	if own != nil {
		if base, err = own.awaitModel(ctx, conn.Bus); err != nil {
			return err
		}
	}
	if r.beside != nil {
		if err := cmp.Or(r.checkVersion(ctx, conn), r.beside.checkVersion(ctx, conn)); err != nil {
			return err
		}
	}
	for _, r := range r.all() {
		if err := r.claimAndPublish(ctx, conn, base, inbox); err != nil {
			return err
		}
	}
	if err := r.awaitOutcomes(ctx, conn, func() {
		progress.groups(progress.total-r.left(), r.refills())
	}); err != nil {
		return err
	}
	log.Debug().Str("run", string(r.id)).Msg("all groups have closed")
	return nil
}

// wanted are the prompts as outcomes know them.
func (r *runner) wanted() []results.Prompt {
	wanted := make([]results.Prompt, len(r.given))
	for i, p := range r.given {
		wanted[i] = results.Prompt{UID: p.uid, Text: p.text}
	}
	return wanted
}

// claimAndPublish claims the run and publishes the prompts without an outcome; their receipts go to inbox. base is the
// checkpoint of the sampler of this process; empty: it has none.
func (r *runner) claimAndPublish(ctx context.Context, conn *connection, base, inbox string) error {
	r.with.BaseDigest = cmp.Or(r.with.begun, base, r.with.BaseDigest)
	if r.with.Model != "" {
		nameLane(r.given, r.with.Model, r.with.BaseDigest)
	}
	if err := r.claimRun(ctx, conn); err != nil {
		return err
	}
	r.bySeq = map[uint64]schemas.UID{}
	for _, p := range r.given {
		if !r.outcomes.Open(p.uid) {
			continue
		}
		if err := p.moveToObjectStore(ctx, conn.Bus); err != nil {
			return withAdvice(ctx, conn.Bus, err)
		}
		data, err := p.encode()
		if err != nil {
			return err
		}
		ack, err := conn.PublishPrompt(ctx, r.id, data, nats.Header{schemas.HeaderReply: {inbox}}, bus.WaitForSpace())
		if err != nil {
			return fmt.Errorf("publish prompt %q: %w", p.uid, err)
		}
		r.bySeq[ack.Seq] = p.uid
	}
	return nil
}

// awaitOutcomes reads advantages and refusals until every prompt has an outcome. It calls changed after each. The error
// is of the server, or the cause of ctx.
func (r *runner) awaitOutcomes(ctx context.Context, conn *connection, changed func()) error {
	if r.left() == 0 {
		return nil
	}
	results, letters := &export.Source{Stream: schemas.StreamAdvantages}, &export.Source{Stream: schemas.StreamDead}
	runs := map[schemas.Run]*runner{}
	for _, r := range r.all() {
		runs[r.id] = r
		results.Filters = append(results.Filters, schemas.AdvantageSubject(r.id, "*"))
		letters.Filters = append(letters.Filters,
			schemas.Address{Kind: schemas.KindDead, Service: "intake", Run: r.id}.Filter())
	}
	for m, err := range live(ctx, conn.Bus, results, letters) {
		if err != nil {
			return fmt.Errorf("follow run %s: %w", r.id, err)
		}
		var d schemas.Dead
		a, _ := schemas.ParseSubject(m.Subject)
		if of := runs[a.Run]; m.Stream == schemas.StreamAdvantages {
			of.outcomes.Add(m)
		} else if schemas.Decode(m.Data, &d) == nil { // intake's letters can be read
			if uid, ours := of.bySeq[d.StreamSeq]; ours && d.Stream == schemas.StreamPrompts {
				of.outcomes.Refuse(uid, d.Reason)
			}
		}
		if changed(); r.left() == 0 {
			return nil
		}
	}
	return context.Cause(ctx)
}

// report writes the results to the folder of the run and prints them. Groups that are not complete give exit status
// 1; if all prompts were refused, it is that of wrong usage.
func (r *runner) report(ctx context.Context, conn *connection, took time.Duration, stdout, stderr io.Writer) error {
	run, err := results.Collect(ctx, conn.Bus, r.id, r.outcomes)
	if err != nil {
		return err
	}
	run.Summary.Seconds = took.Seconds()
	if dir := r.folder(); dir != "" {
		if err := run.Write(ctx, conn.Bus, dir); err != nil {
			return err
		}
	}
	if r.SaveLatents != "" {
		left, err := run.WriteLatents(ctx, conn.Bus, r.SaveLatents)
		if err != nil {
			return err
		}
		if left > 0 {
			fmt.Fprintf(stderr, "%s does not have %s that did not complete\n", r.SaveLatents,
				present.Count(left, "sample"))
		}
	}
	if r.json {
		err = run.WriteJSON(stdout)
	} else {
		printRun(stdout, run)
	}
	if err != nil {
		return err
	}
	r.reportRefused(stderr)
	if run.Summary.Refused == len(r.given) {
		return &exitError{status: exitUsage}
	}
	return notComplete(run.Groups, func(g *results.Group) string { return g.Status })
}

// reportRefused prints each reason of refusal once, with its prompts.
func (r *runner) reportRefused(stderr io.Writer) {
	uids := map[string][]string{}
	var reasons []string
	for _, p := range r.given {
		reason, refused := r.outcomes.Refused(p.uid)
		if !refused {
			continue
		}
		reason = r.prompts.names.nameFlags(reason)
		if uids[reason] == nil {
			reasons = append(reasons, reason)
		}
		uids[reason] = append(uids[reason], string(p.uid))
	}
	for _, reason := range reasons {
		list := uids[reason]
		present.PrintEscaped(stderr, fmt.Sprintf("meander: %s refused: %s", present.Count(len(list), "prompt"), reason))
		if len(list) < len(r.given) {
			fmt.Fprintf(stderr, "  %s\n", strings.Join(list, " "))
		}
	}
}

// sortedKeys returns the keys of a map in order, for output that does not depend on map order.
func sortedKeys[K cmp.Ordered, V any](m map[K]V) []K { return slices.Sorted(maps.Keys(m)) }
