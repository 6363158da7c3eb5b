package command

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/user"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/outcomes"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/boot"
	"github.com/meander-rl/meander/services/internal/present"
)

// controller is a command that changes a run: cancel, pause, resume or prune.
type controller struct {
	*app
	schemas.Control
	wait time.Duration
}

// cancelCommand makes the command 'meander cancel'.
func cancelCommand(a *app) *cobra.Command {
	return a.controlCommand(&cobra.Command{
		Use:   "cancel RUN [UID]",
		Short: "end a run, or one of its groups, now",
		Long: `cancel ends a run, or with UID one of its groups. Samplers stop its samples at the next step, and
waiting requests are removed. Each group without a result gets the status cancelled, so that readers
of the group and of its batch do not wait. A cancelled group is not refilled and has nothing to train
on. Groups that have a result keep it.

A cancelled run stays cancelled: prompts that are published to it later are cancelled too. To stop for
a while, use 'meander pause'.`,
		Example: `  meander cancel demo
  meander cancel demo 0000-a-red-sign-that-says-open --reason "a typo in the prompt"`,
	}, schemas.ControlCancel)
}

// pauseCommand makes the command 'meander pause'.
func pauseCommand(a *app) *cobra.Command {
	return a.controlCommand(&cobra.Command{
		Use:   "pause RUN",
		Short: "pause a run until 'meander resume'",
		Long: `pause stops a run until it is resumed. Samplers stop its samples at the next step and work on other
runs. The requests are parked outside the queues: they need no slot and no delivery, and they survive
restarts of every service and of the server. Finished samples are still scored. New prompts are
accepted, and their requests are parked.

The time limit of groups (group_timeout) does not run while the run is paused; it starts again when
the run is resumed. The deadline of a prompt is a fixed time and still holds: a group whose deadline
passes during the pause closes with the samples that it has.`,
		Example: `  meander pause demo --reason "the GPU is needed elsewhere until noon"
  meander status demo
  meander resume demo`,
	}, schemas.ControlPause)
}

// resumeCommand makes the command 'meander resume'.
func resumeCommand(a *app) *cobra.Command {
	return a.controlCommand(&cobra.Command{
		Use:   "resume RUN",
		Short: "continue a paused run",
		Long: `resume continues a paused run: its parked requests go back into their queues. The samples have the
same bits as without the pause.`,
		Example: `  meander resume demo`,
	}, schemas.ControlResume)
}

// pruneCommand makes the command 'meander prune'.
func pruneCommand(a *app) *cobra.Command {
	return a.controlCommand(&cobra.Command{
		Use:   "prune RUN UID SAMPLE",
		Short: "end one sample early; its group closes without it",
		Long: `prune ends a sample at the next step boundary, or with --step at the first boundary from that step on.
It is for methods that choose among samples while they are made. The stored steps of the sample stay.
The group closes without it, as without a failed sample, and says which samples were pruned and why.
The advantages are computed among the other samples.

A prompt can have a rule instead: see --prune-step of 'meander run'.`,
		Example: `  meander prune demo p1 3
  meander prune demo p1 3 --step 6 --reason "far from the best"`,
	}, schemas.ControlPrune)
}

// statusCommand makes the command 'meander status'.
func statusCommand(a *app) *cobra.Command {
	var run schemas.Run
	return &cobra.Command{
		Use:   "status [RUN]",
		Short: "show how a run is doing, or what became of it",
		Long: `status shows the state of a run (default the latest): whether it was paused or cancelled, by whom and
why, how much of it is done, and what it waits for.`,
		Example: `  meander status
  meander status demo --json`,
		PreRunE: func(_ *cobra.Command, given []string) error { return runArgument(&run, given) },
		RunE: a.withRun(&run, func(c *cobra.Command, conn *connection, _ []string) error {
			s, err := client.New(conn.Bus).Status(c.Context(), run)
			if errors.Is(err, client.ErrNotFound) {
				return usage(fmt.Errorf("RUN: %q; nothing is stored of it at %s", run, conn.where))
			}
			if err != nil {
				return err
			}
			waits, err := runWaits(c.Context(), conn.Bus, run, s)
			if err != nil { // such as a user without the right to ask
				waits = []outcomes.Wait{{Says: fmt.Sprintf("not known: %v", err)}}
			}
			return a.printStatus(c.OutOrStdout(), run, s, waits)
		}),
	}
}

// runWaits reads what a run of this status waits for.
func runWaits(
	ctx context.Context, b *bus.Bus, run schemas.Run, status *schemas.RunStatus,
) ([]outcomes.Wait, error) {
	ctx, done := context.WithTimeout(ctx, topTimeout)
	defer done()
	reader := newReader(ctx, b, true)
	defer reader.Close()
	return reader.Waits(ctx, run, status)
}

// controlCommand gives a command that controls a run its flags, and a RunE that sends the action to intake and prints
// the outcome. Cancel, pause, resume and prune are such commands.
func (a *app) controlCommand(c *cobra.Command, action string) *cobra.Command {
	k := &controller{app: a, Control: schemas.Control{Action: action}}
	c.Flags().StringVar(&k.Reason, "reason", "", "reason; others see it")
	c.Flags().StringVar(&k.By, "by", "", "who asks; default user@host")
	if action == schemas.ControlPrune {
		c.Flags().Int64Var(&k.StepIndex, "step", 0,
			"end the sample at the first boundary from this step on; 0: at the next boundary")
	}
	c.Flags().DurationVar(&k.wait, "wait", 10*time.Second,
		"how long to wait for intake's answer and until samplers have stopped")
	c.RunE = a.withBus(func(c *cobra.Command, conn *connection, given []string) error {
		k.Run, k.By = schemas.Run(given[0]), cmp.Or(k.By, currentUser())
		if len(given) > 1 {
			k.UID = schemas.UID(given[1])
		}
		if len(given) > 2 {
			n, err := strconv.ParseInt(given[2], 10, 64)
			if err != nil {
				return usage(fmt.Errorf("SAMPLE: %q; must be the index of a sample", given[2]))
			}
			k.SampleIndex = &n
		}
		if err := k.Validate(); err != nil {
			return usage(err)
		}
		if err := checkWait(k.wait); err != nil {
			return err
		}
		return k.sendControl(c.Context(), conn, c.OutOrStdout())
	})
	return c
}

func currentUser() string {
	name, host := "", ""
	if u, err := user.Current(); err == nil {
		name = u.Username
	}
	host, _ = os.Hostname()
	return name + "@" + host
}

// sendControl publishes the control, waits for intake's answer and until samplers have stopped, and prints both. A
// refusal is a usage error; no answer in time, or a sampler that does not stop, is a failure.
func (k *controller) sendControl(ctx context.Context, conn *connection, out io.Writer) error {
	wait := k.wait
	if conn.serves() {
		wait = min(wait, time.Second) // this process runs no intake
	}
	answer, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	peer := client.New(conn.Bus)
	r, err := peer.Control(answer, &k.Control)
	refused, isRefused := errors.AsType[*client.RefusedError](err)
	switch {
	case isRefused:
		return usage(errors.New(refused.Reason))
	case errors.Is(err, client.ErrNoAnswer) && ctx.Err() == nil:
		return fmt.Errorf("%s of run %s: no intake answered in %v; the request is stored, and the next intake that "+
			"runs answers it", k.Action, k.Control.Run, wait)
	case err != nil:
		return withAdvice(ctx, conn.Bus, err)
	}
	samplers, late := 0, error(nil)
	if r.Unchanged == "" && (k.Action == schemas.ControlPause || k.Action == schemas.ControlCancel) {
		samplers, late = peer.AwaitControl(answer, r.Seq)
	}
	if k.json {
		err = encode(out, schemas.JSON(r))
	} else {
		err = k.printOutcome(out, r, samplers)
	}
	if late != nil && ctx.Err() == nil {
		late = fmt.Errorf("%s of run %s is accepted, but %w; see 'meander status %s'", k.Action, k.Control.Run, late,
			k.Control.Run)
	}
	return errors.Join(err, late)
}

// printOutcome says what an accepted control did. samplers is how many run.
func (k *controller) printOutcome(out io.Writer, r *schemas.ControlReceipt, samplers int) error {
	what := "run " + string(r.Run)
	if r.UID != "" {
		what = "group " + string(r.UID)
	}
	if r.Unchanged != "" {
		_, err := fmt.Fprintf(out, "nothing to %s: %s\n", k.Action, r.Unchanged)
		return err
	}
	stopped := fmt.Sprintf("none of %s works on it any more", present.Count(samplers, "sampler"))
	if samplers == 1 {
		stopped = "the sampler does not work on it any more"
	} else if samplers == 0 {
		stopped = "no sampler runs"
	}
	switch k.Action {
	case schemas.ControlCancel:
		present.Linef(out, "%s is cancelled: %s removed; %s", what, present.Count(r.Requests, "request"), stopped)
	case schemas.ControlPause:
		present.Linef(out, "%s is paused: %s", what, stopped)
		present.Linef(out, "continue it with: meander resume %s", r.Run)
	case schemas.ControlPrune:
		present.Linef(out, "sample %d of %s ends at its next step boundary from step %d on", *k.SampleIndex, what,
			k.StepIndex)
	case schemas.ControlResume:
		present.Linef(out, "%s continues: %s back in the queue", what, present.Count(r.Requests, "parked request"))
	}
	return nil
}

// printStatus prints the state of a run, and what it waits for.
func (a *app) printStatus(out io.Writer, run schemas.Run, s *schemas.RunStatus, waits []outcomes.Wait) error {
	if a.json {
		fields := schemas.JSON(&schemas.ControlReceipt{Accepted: true, Run: run, Status: s}).(map[string]any)
		fields["waits"] = waits
		return encode(out, fields)
	}
	present.Linef(out, "run %s: %s", run, stateText(out, s))
	var ended []string
	for _, o := range s.Outcomes {
		if o.Outcome != outcomes.Open {
			ended = append(ended, fmt.Sprintf("%d %s", o.Groups, o.Outcome))
		}
	}
	when := present.When
	field := func(name string, parts ...string) { present.Field(out, 12, "  "+name, strings.Join(parts, "")) }
	field("groups", fmt.Sprintf("%d of %d have their result", s.Closed, s.Groups),
		when(len(ended) > 0, ": %s", strings.Join(ended, ", ")),
		when(s.OpenBatches > 0, ", %s open", present.Count(s.OpenBatches, "batch")),
		when(s.Refused > 0, ", %s refused without one", present.Count(s.Refused, "prompt")),
		when(s.Cancelled > 0, ", %d cancelled one by one", s.Cancelled))
	field("samples", fmt.Sprintf("%d made, %d with their reward", s.Trajectories, s.Rewards),
		when(s.Failed > 0, ", %d ended without one", s.Failed), when(s.SavedEvaluations > 0, "; %s",
			savedText(s.SavedEvaluations)))
	field("requests", fmt.Sprintf("%d in the queue or in flight", s.Waiting),
		when(s.Parked > 0, ", %d parked until the run is resumed", s.Parked), when(s.Lost > 0, ", %d lost", s.Lost))
	label := "waits"
	if outcomes.HasEnded(s.State) {
		label = "reason"
	}
	for _, w := range waits {
		field(cmp.Or(present.When(w.Rule != "", "alarm"), label), boot.Safe(w.Says))
		if w.Fix != "" {
			field("", "-> "+w.Fix)
		}
	}
	return nil
}

// stateText says how a run is doing, or what became of it, by whom, and what it waits for.
func stateText(out io.Writer, s *schemas.RunStatus) string {
	return paintStatus(out, s.State) + controlledBy(s) + heldText(s.WaitsFor)
}

// heldText follows the state of a run that waits.
func heldText(waitsFor string) string {
	return present.When(waitsFor != "", ", %s", outcomes.For(waitsFor).Held())
}

// controlledBy returns text to follow a run's state: who paused or cancelled the run, when and why; "" for a run that
// goes on or is done.
func controlledBy(s *schemas.RunStatus) string {
	return boot.Safe(present.When(s.By != "", " by %s", s.By) +
		present.When(s.Since > 0, " at %s", time.Unix(0, s.Since).UTC().Format(time.RFC3339)) +
		present.When(s.Reason != "", ": %s", s.Reason))
}

// describeControl describes a control in one line, for 'meander watch'.
func describeControl(c *schemas.Control) string {
	text := c.Action + " of run " + string(c.Run)
	if c.UID != "" {
		text = c.Action + " of group " + string(c.UID)
	}
	if c.SampleIndex != nil {
		text += fmt.Sprintf(", sample %d", *c.SampleIndex)
	}
	return text + present.When(c.By != "", " by %s", c.By) + present.When(c.Reason != "", ": %s", c.Reason)
}
