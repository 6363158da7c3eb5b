package command

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/user"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/schemas"
)

// controller is one of the commands that ask something of a run.
type controller struct {
	*app
	schemas.Control
	wait time.Duration
}

func cancelCommand(a *app) *cobra.Command {
	return a.controlCommand(&cobra.Command{
		Use:   "cancel RUN [UID]",
		Short: "end a run, or one group of it, without what it lacks",
		Long: `cancel ends a run, or with UID one of its groups. Samplers let go of its samples at the
next step, requests that wait are removed, and each group without a result gets one, with
status cancelled: whoever waits for the group, or for its batch, learns it. A cancelled
group is not refilled, and nothing is trained on. What has its result keeps it.

What was cancelled stays so: prompts that are published to the run later are cancelled,
too. To stop for a while, see 'meander pause'.`,
		Example: `  meander cancel demo
  meander cancel demo 0000-a-red-sign-that-says-open --reason "a typo in the prompt"`,
		Args: args(cobra.RangeArgs(1, 2)),
	}, schemas.ControlCancel)
}

func pauseCommand(a *app) *cobra.Command {
	return a.controlCommand(&cobra.Command{
		Use:   "pause RUN",
		Short: "let a run wait: its samplers take no step until it is resumed",
		Long: `pause lets a run wait. Samplers put its samples down at the next step and take others;
the requests are parked outside the queues, where they hold no slot, cost no deliveries and
wait as long as it takes, through restarts of every service and of the server. What has been
sampled is scored. Prompts are accepted, and their requests parked.

The time limit of groups (group_timeout) stands still while their run is paused, and counts
anew from when it is resumed. A deadline that a prompt names is a moment and holds all the
same: a group that is paused beyond its own closes with what it has.`,
		Example: `  meander pause demo --reason "the GPU is needed elsewhere until noon"
  meander status demo
  meander resume demo`,
		Args: args(cobra.ExactArgs(1)),
	}, schemas.ControlPause)
}

func resumeCommand(a *app) *cobra.Command {
	return a.controlCommand(&cobra.Command{
		Use:   "resume RUN",
		Short: "let a paused run go on",
		Long: `resume lets a run go on that was paused: the parked requests go back into their queues.
The samples have the same bits as without the pause.`,
		Example: `  meander resume demo`,
		Args:    args(cobra.ExactArgs(1)),
	}, schemas.ControlResume)
}

func pruneCommand(a *app) *cobra.Command {
	return a.controlCommand(&cobra.Command{
		Use:   "prune RUN UID SAMPLE",
		Short: "end one sample in the middle; its group closes without it",
		Long: `prune ends a sample at the next step boundary, or with --step at the first boundary from
that step on, for methods that choose among samples while they are made. The steps that it
has stay stored; the group closes without it, as without a sample that failed, and says
who was pruned and why. The advantages are those of the others among themselves.

A prompt can have a rule instead: see --prune-step of 'meander run'.`,
		Example: `  meander prune demo p1 3
  meander prune demo p1 3 --step 6 --reason "far from the best"`,
		Args: args(cobra.ExactArgs(3)),
	}, schemas.ControlPrune)
}

func statusCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "status [RUN]",
		Short: "how a run is doing: running, paused, cancelled or done",
		Long: `status says how a run is doing, the latest where none is named: whether it was paused or
cancelled, by whom and why, and how much of it is done.`,
		Example: `  meander status
  meander status demo --json`,
		Args: args(cobra.MaximumNArgs(1)),
		RunE: a.withBus(func(c *cobra.Command, conn *connection, given []string) error {
			var run schemas.Run
			if len(given) > 0 {
				run = schemas.Run(given[0])
			} else {
				var err error
				if run, err = latestRun(c.Context(), conn.Bus); err != nil {
					return err
				}
			}
			if err := schemas.CheckToken("RUN", run); err != nil {
				return usage(err)
			}
			s, err := client.New(conn.Bus).Status(c.Context(), run)
			if errors.Is(err, client.ErrNotFound) {
				return usage(fmt.Errorf("RUN: %q; nothing is stored of it at %s", run, conn.where))
			}
			if err != nil {
				return err
			}
			return a.printStatus(c.OutOrStdout(), &schemas.ControlReceipt{Accepted: true, Run: run, Status: s})
		}),
	}
}

// controlCommand is a command that asks for an action and says what came of it.
func (a *app) controlCommand(c *cobra.Command, action string) *cobra.Command {
	k := &controller{app: a, Control: schemas.Control{Action: action}}
	c.Flags().StringVar(&k.Reason, "reason", "", "why, for those who see it")
	c.Flags().StringVar(&k.By, "by", "", "who asks; default you, as user@host")
	if action == schemas.ControlPrune {
		c.Flags().Int64Var(&k.StepIndex, "step", 0, "take the steps before this one; 0: end it at the next boundary")
	}
	c.Flags().DurationVar(&k.wait, "wait", 10*time.Second, "how long to wait for intake's answer, and for the samplers to stop")
	c.RunE = a.withBus(func(c *cobra.Command, conn *connection, given []string) error {
		k.Run, k.By = schemas.Run(given[0]), cmp.Or(k.By, me())
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
		return k.ask(c.Context(), conn, c.OutOrStdout())
	})
	return c
}

// me is who runs this command.
func me() string {
	name, host := "", ""
	if u, err := user.Current(); err == nil {
		name = u.Username
	}
	host, _ = os.Hostname()
	return name + "@" + host
}

// ask publishes the control, and says what intake answers and when the samplers obey.
func (k *controller) ask(ctx context.Context, conn *connection, out io.Writer) error {
	wait := k.wait
	if conn.serves() {
		wait = min(wait, time.Second) // nobody else is there to answer
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
		return fmt.Errorf("%s of run %s: no intake answered in %v; it is stored, and taken up when one runs", k.Action, k.Control.Run, wait)
	case err != nil:
		return advise(ctx, conn.Bus, err)
	}
	samplers, late := 0, error(nil)
	if r.Unchanged == "" && (k.Action == schemas.ControlPause || k.Action == schemas.ControlCancel) {
		samplers, late = peer.Obeyed(answer, r.Seq)
	}
	if k.json {
		err = json.NewEncoder(out).Encode(schemas.JSON(r))
	} else {
		err = k.print(out, r, samplers)
	}
	if late != nil && ctx.Err() == nil {
		late = fmt.Errorf("%s of run %s holds, but %w; see 'meander status %s'", k.Action, k.Control.Run, late, k.Control.Run)
	}
	return errors.Join(err, late)
}

// print says what became of a control that was accepted.
func (k *controller) print(out io.Writer, r *schemas.ControlReceipt, samplers int) error {
	what := "run " + string(r.Run)
	if r.UID != "" {
		what = "group " + string(r.UID)
	}
	if r.Unchanged != "" {
		_, err := fmt.Fprintf(out, "nothing to %s: %s\n", k.Action, r.Unchanged)
		return err
	}
	stopped := fmt.Sprintf("none of %s takes steps of it any more", count(samplers, "sampler"))
	if samplers == 1 {
		stopped = "the sampler takes no steps of it any more"
	} else if samplers == 0 {
		stopped = "no sampler runs"
	}
	switch k.Action {
	case schemas.ControlCancel:
		fmt.Fprintf(out, "%s is cancelled: %s removed; %s\n", what, count(int(r.Requests), "request"), stopped)
	case schemas.ControlPause:
		fmt.Fprintf(out, "%s is paused: %s\n", what, stopped)
		fmt.Fprintf(out, "it goes on with: meander resume %s\n", r.Run)
	case schemas.ControlPrune:
		fmt.Fprintf(out, "sample %d of %s ends at its next step boundary from step %d on\n", *k.SampleIndex, what, k.StepIndex)
	case schemas.ControlResume:
		fmt.Fprintf(out, "%s goes on: %s back in the queue\n", what, count(int(r.Requests), "parked request"))
	}
	return nil
}

// printStatus prints how a run is doing.
func (a *app) printStatus(out io.Writer, r *schemas.ControlReceipt) error {
	if a.json {
		return json.NewEncoder(out).Encode(schemas.JSON(r))
	}
	s := r.Status
	fmt.Fprintf(out, "run %s: %s\n", r.Run, paintStatus(out, s.State)+byWhom(s))
	groups := fmt.Sprintf("%d of %d have their result", s.Closed, s.Groups)
	if s.OpenBatches > 0 {
		groups += ", " + count(int(s.OpenBatches), "batch") + " open"
	}
	if s.Cancelled > 0 {
		groups += fmt.Sprintf(", %d cancelled one by one", s.Cancelled)
	}
	fmt.Fprintf(out, "  groups    %s\n", groups)
	fmt.Fprintf(out, "  samples   %d made, %d with their reward\n", s.Trajectories, s.Rewards)
	waiting := fmt.Sprintf("%d in the queue or in hand", s.Waiting)
	if s.Parked > 0 {
		waiting += fmt.Sprintf(", %d parked until the run goes on", s.Parked)
	}
	fmt.Fprintf(out, "  requests  %s\n", waiting)
	if s.State == schemas.RunPaused {
		fmt.Fprintf(out, "it goes on with: meander resume %s\n", r.Run)
	}
	return nil
}

// byWhom says who paused or cancelled a run, when and why; "" for one that runs or is done.
func byWhom(s *schemas.RunStatus) string {
	text := ""
	if s.By != "" {
		text += " by " + s.By
	}
	if s.Since > 0 {
		text += " at " + time.Unix(0, s.Since).UTC().Format(time.RFC3339)
	}
	if s.Reason != "" {
		text += ": " + s.Reason
	}
	return text
}

// asked is what a control asks for, in a line.
func asked(c *schemas.Control) string {
	text := c.Action + " of run " + string(c.Run)
	if c.UID != "" {
		text = c.Action + " of group " + string(c.UID)
	}
	if c.SampleIndex != nil {
		text += fmt.Sprintf(", sample %d", *c.SampleIndex)
	}
	if c.By != "" {
		text += " by " + c.By
	}
	if c.Reason != "" {
		text += ": " + c.Reason
	}
	return text
}
