package command

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/reward"
)

func runCommand(a *app) *cobra.Command {
	r := &runner{app: a, services: defaultServices()}
	c := &cobra.Command{
		Use:   "run [PROMPT ...]",
		Short: "make rollouts for prompts, wait for them, and print rewards and advantages",
		Long: `run sends prompts through the pipeline and follows them to the end: a progress bar
while the steps happen, then a table of groups with rewards and advantages, and a
folder with the pictures, a contact sheet per group and results.jsonl.

Without --nats, and when no pipeline runs on the store, it runs the whole pipeline
in this process. Everything is stored as it happens: after a crash or a kill, the
same command with the same --run and --store goes on where it stopped.

Exit status: 0 all groups complete, 1 some are not, 2 wrong usage or every prompt refused.`,
		Example: `  meander run 'a red sign that says "OPEN"' 'a blue sign that says "4071"'
  meander run --group-size 8 --sde-steps 2,3 --return-steps 2,3,4 --json 'a red sign that says "OPEN"'
  meander run --model DIR --reward jpeg_compressibility "a red fox"    # a checkpoint of your own
  meander run --prompts prompts.txt --group-size 16 --sde-window 2:0-5 --latents-dtype F16
  meander run --prompts words.csv --template 'a {colour} sign that says "{prompt}"' --plan
  meander run --run night --prompts prompts.jsonl        # again after a crash: it resumes`,
		RunE: func(c *cobra.Command, texts []string) error {
			prompts, err := r.prompts.load(texts, c.InOrStdin(), true)
			if err != nil {
				return err
			}
			if r.prompts.plan {
				return r.planOnly(c.Context(), &r.prompts.datasetFlags, &r.services, prompts, c.OutOrStdout())
			}
			return r.run(c.Context(), prompts, c.OutOrStdout(), c.ErrOrStderr())
		},
	}
	section(c.Flags(), outputSection, func(f *pflag.FlagSet) {
		f.StringVar(&r.id, "run", "", "run id; give it again to resume; default a new one")
		f.StringVar(&r.out, "out", "", "folder for pictures, contact sheets and results.jsonl; default meander-out/<run>; - for none")
		f.StringVar(&r.saveLatents, "save-latents", "", "write every kept state to this safetensors file, packed [n, S, C] in F32")
	})
	r.prompts.register(c.Flags())
	section(c.Flags(), pipelineSection, func(f *pflag.FlagSet) { samplerFlags(f, &r.services) })
	section(c.Flags(), limitSection, r.services.limits.Flags)
	return c
}

// runner is one run command.
type runner struct {
	*app
	prompts  promptFlags
	services services
	id       string
	out      string

	saveLatents string
}

func (r *runner) run(ctx context.Context, prompts []prompt, stdout, stderr io.Writer) error {
	log, err := r.logger()
	if err != nil {
		return err
	}
	if r.id == "" {
		r.id = newRunID()
	}
	if err := schemas.CheckToken("--run", r.id); err != nil {
		return usage(err)
	}
	if err := r.services.validate(); err != nil {
		return err
	}
	conn, err := r.connectServing(ctx, &r.services, log)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetLimits(ctx, r.services.limits.Streams()...); err != nil {
		return err
	}
	if err := r.services.validate(); err != nil { // of what a pipeline that runs has set
		return err
	}
	if conn.member != nil {
		// Better now than after the samples are made.
		if err := reward.CheckNames(r.services.Reward, rewardNames(prompts)); err != nil {
			return usage(err)
		}
	}
	var own *services
	if conn.serves() {
		own = &r.services
	} else {
		fmt.Fprintf(stderr, "joining the pipeline at %s\n", conn.where)
	}
	if err := r.prompts.show(ctx, conn, own, r.id, prompts, stderr); err != nil {
		return err
	}

	began := time.Now()
	// The services end with the run, or when it fails; a service that fails ends the run.
	work, stop := context.WithCancelCause(ctx)
	served := make(chan error, 1)
	go func() {
		err := conn.serve(work, func(ctx context.Context) error { return r.services.run(ctx, conn, log) })
		if err != nil {
			stop(err)
		}
		served <- err
	}()
	outcome, err := r.follow(work, conn, prompts, stderr, log)
	stop(nil)
	serveErr := <-served
	switch {
	case ctx.Err() != nil && err != nil:
		return fmt.Errorf("interrupted; go on with: meander run --run %s --store %s and the same prompts", r.id, r.store)
	case serveErr != nil:
		return fmt.Errorf("pipeline: %w", serveErr)
	case err != nil:
		return err
	}
	outcome.seconds = time.Since(began).Seconds()
	return r.report(context.WithoutCancel(ctx), conn, prompts, outcome, stdout, stderr)
}

// outcome is what became of each prompt.
type outcome struct {
	// advantages by the uid of the prompt: of its group, or of the last one that stood in for
	// it.
	advantages map[string]*schemas.Advantage
	refused    map[string]*schemas.Dead // by uid
	refills    int
	seconds    float64
}

// follow publishes what is not done yet and waits until every group has a result.
func (r *runner) follow(ctx context.Context, conn *connection, prompts []prompt, stderr io.Writer, log zerolog.Logger) (*outcome, error) {
	if err := r.claim(ctx, conn, prompts); err != nil {
		return nil, err
	}
	o := &outcome{advantages: map[string]*schemas.Advantage{}, refused: map[string]*schemas.Dead{}}
	pending := map[string]bool{}
	for _, p := range prompts {
		pending[p.uid] = true
	}
	stored, err := conn.LastMany(ctx, schemas.StreamAdvantages, []string{schemas.AdvantageSubject(r.id, "*")})
	if err != nil {
		return nil, fmt.Errorf("read stored advantages: %w", err)
	}
	for _, m := range stored {
		if err := o.take(m, pending); err != nil {
			return nil, err
		}
	}
	if done := len(prompts) - len(pending); done > 0 {
		fmt.Fprintf(stderr, "run %s: %d of %d groups are done already, resuming\n", r.id, done, len(prompts))
	}

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	progress := newProgress(stderr, r.json, r.id, len(prompts), pending)
	defer progress.close()
	progress.watch(ctx, conn.Bus)
	var watching sync.WaitGroup
	defer watching.Wait()
	defer cancel()
	watching.Go(func() { watchFaults(ctx, conn.Bus, progress.note) })
	inbox := conn.Conn().NewInbox()
	receipts, err := conn.Conn().Subscribe(inbox, progress.receipts())
	if err != nil {
		return nil, fmt.Errorf("subscribe to receipts: %w", err)
	}
	defer func() { _ = receipts.Unsubscribe() }()
	// The dead letters of a prompt carry its stream sequence.
	bySeq := map[uint64]string{}
	for _, p := range prompts {
		if !pending[p.uid] {
			continue
		}
		if err := p.offload(ctx, conn.Bus); err != nil {
			return nil, advise(ctx, conn.Bus, err)
		}
		data, err := p.encode()
		if err != nil {
			return nil, err
		}
		ack, err := conn.PublishPrompt(ctx, r.id, data, nats.Header{schemas.HeaderReply: {inbox}}, bus.WaitForSpace())
		if err != nil {
			return nil, fmt.Errorf("publish prompt %q: %w", p.uid, err)
		}
		bySeq[ack.Seq] = p.uid
	}
	type item struct {
		m   *bus.Message
		err error
	}
	events := make(chan item)
	feed := func(stream, filter string) {
		for m, err := range conn.Read(ctx, stream, []string{filter}, bus.ReadOptions{Live: true}) {
			select {
			case events <- item{m, err}:
			case <-ctx.Done():
				return
			}
		}
	}
	go feed(schemas.StreamAdvantages, schemas.AdvantageSubject(r.id, "*"))
	go feed(schemas.StreamDead, schemas.Prefix+"dead.intake.*.*")
	for len(pending) > 0 {
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case e := <-events:
			if e.err != nil {
				return nil, fmt.Errorf("follow run %s: %w", r.id, e.err)
			}
			if e.m.Stream == schemas.StreamAdvantages {
				if err := o.take(e.m, pending); err != nil {
					return nil, err
				}
				break
			}
			var d schemas.Dead
			if err := schemas.Decode(e.m.Data, &d); err != nil {
				break // whoever wrote it: intake's own can be read
			}
			if uid, ours := bySeq[d.StreamSeq]; ours && d.Stream == schemas.StreamPrompts && pending[uid] {
				o.refused[uid] = &d
				delete(pending, uid)
			}
		}
		progress.groups(len(prompts)-len(pending), o.refills)
	}
	log.Debug().Str("run", r.id).Msg("all groups have closed")
	return o, nil
}

func (o *outcome) take(m *bus.Message, pending map[string]bool) error {
	var a schemas.Advantage
	if bus.Fits(m, &a) != nil {
		return nil // the group's result will take its place
	}
	uid := a.UID
	if a.Refill != nil {
		uid = a.Refill.Root
	}
	switch {
	case !pending[uid]:
	case a.RefilledBy != "": // a fresh group is on its way
		o.refills++
	case a.Status == schemas.StatusRefused: // which the dead letter says, too
		o.refused[uid] = &schemas.Dead{Reason: a.Error}
		delete(pending, uid)
	default:
		o.advantages[uid] = &a
		delete(pending, uid)
	}
	return nil
}

// claim writes the run's spec on first use; a run id used for other prompts is refused.
func (r *runner) claim(ctx context.Context, conn *connection, prompts []prompt) error {
	h := sha256.New()
	for _, p := range prompts {
		body := maps.Clone(p.body)
		delete(body, "deadline") // relative to now, so not part of what was asked
		data, err := prompt{uid: p.uid, body: body}.encode()
		if err != nil {
			return err
		}
		h.Write(data)
	}
	digest := hex.EncodeToString(h.Sum(nil))
	spec, err := json.Marshal(map[string]any{"prompts": len(prompts), "digest": digest, "created": time.Now().UnixNano()})
	if err != nil {
		return err
	}
	stored, created, err := conn.CreateRun(ctx, r.id, spec)
	if err != nil || created {
		return err
	}
	var old struct {
		Digest string `json:"digest"`
	}
	if err := json.Unmarshal(stored, &old); err != nil {
		return fmt.Errorf("stored spec of run %q: %w", r.id, err)
	}
	if old.Digest != digest {
		return usage(fmt.Errorf("--run: %q was started with other prompts or settings; resume it with the same ones, or choose another id", r.id))
	}
	return nil
}

// report prints and writes the results and returns the exit status.
func (r *runner) report(ctx context.Context, conn *connection, prompts []prompt, o *outcome, stdout, stderr io.Writer) error {
	results, err := collect(ctx, conn.Bus, r.id, prompts, o)
	if err != nil {
		return err
	}
	results.Summary.Seconds = o.seconds
	dir := r.out
	if dir == "" {
		dir = filepath.Join("meander-out", r.id)
	}
	if dir != "-" {
		if err := results.write(ctx, conn.Bus, dir); err != nil {
			return err
		}
	}
	if r.saveLatents != "" {
		if err := results.saveLatents(ctx, conn.Bus, r.saveLatents); err != nil {
			return err
		}
	}
	if r.json {
		err = results.printJSON(stdout)
	} else {
		err = results.print(stdout)
	}
	if err != nil {
		return err
	}
	r.reportRefused(prompts, o, stderr)
	switch s := results.Summary; {
	case s.Complete == len(prompts):
		return nil
	case len(o.refused) == len(prompts):
		return &exitError{status: exitUsage}
	default:
		return &exitError{status: exitFailed}
	}
}

// reportRefused says each reason once, with the prompts that it holds for.
func (r *runner) reportRefused(prompts []prompt, o *outcome, stderr io.Writer) {
	uids := map[string][]string{}
	var reasons []string
	for _, p := range prompts {
		d := o.refused[p.uid]
		if d == nil {
			continue
		}
		reason := blame(d.Reason, r.prompts.flagOf)
		if uids[reason] == nil {
			reasons = append(reasons, reason)
		}
		uids[reason] = append(uids[reason], p.uid)
	}
	for _, reason := range reasons {
		list := uids[reason]
		fmt.Fprintf(stderr, "meander: %s refused: %s\n", count(len(list), "prompt"), reason)
		if len(list) < len(prompts) {
			fmt.Fprintf(stderr, "  %s\n", strings.Join(list, " "))
		}
	}
}

// sortedKeys of a map, for output that does not depend on map order.
func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
