package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// watched are the event kinds of watch, in the order data flows.
var watched = []struct{ kind, stream, filter string }{
	{"prompt", schemas.StreamPrompts, "prompt.%s"},
	{"step", schemas.StreamSteps, "step.%s.>"},
	{"trajectory", schemas.StreamTrajectories, "trajectory.%s.*.*"},
	{"reward", schemas.StreamRewards, ""},
	{"advantage", schemas.StreamAdvantages, "advantage.%s.*"},
	{"batch", schemas.StreamAdvantages, "batch.%s.*"},
	{"dead", schemas.StreamDead, "dead.*.%s.*"},
}

func watchCommand(a *app) *cobra.Command {
	var run, uid string
	var kinds []string
	var since time.Duration
	var all bool
	var count int
	names := make([]string, len(watched))
	for i, w := range watched {
		names[i] = w.kind
	}
	c := &cobra.Command{
		Use:   "watch",
		Short: "print events as they happen, one line each",
		Long: `watch follows a running pipeline: one line per event, until interrupted. It reads
from the streams, so it can start in the past and never slows the pipeline down.`,
		Example: `  meander watch
  meander watch --run demo --kinds trajectory,reward,advantage
  meander watch --run demo --uid 0000-a-red-fox --all --json`,
		Args: args(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error {
			for _, k := range kinds {
				if !slices.Contains(names, k) {
					return usage(fmt.Errorf("--kinds: %q; must be among %s", k, strings.Join(names, ", ")))
				}
			}
			log, err := a.logger()
			if err != nil {
				return err
			}
			conn, err := a.openExisting(c.Context(), log)
			if err != nil {
				return err
			}
			defer conn.Close()
			options := bus.ReadOptions{Live: true, FromTime: time.Now().Add(-since)}
			if all {
				options = bus.ReadOptions{Live: true}
			}
			fmt.Fprintf(c.ErrOrStderr(), "watching %s\n", conn.where)
			return a.watch(c.Context(), conn, kinds, run, uid, options, count, c.OutOrStdout())
		},
	}
	c.Flags().StringVar(&run, "run", "*", "only this run")
	c.Flags().StringVar(&uid, "uid", "", "only this group")
	c.Flags().StringSliceVar(&kinds, "kinds", names, "kinds of events to print")
	c.Flags().DurationVar(&since, "since", 0, "start this long ago")
	c.Flags().BoolVar(&all, "all", false, "start at the beginning of what is stored")
	c.Flags().IntVar(&count, "count", 0, "stop after this many events; 0: never")
	return c
}

func (a *app) watch(ctx context.Context, conn *connection, kinds []string, run, uid string, options bus.ReadOptions, count int, out io.Writer) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type item struct {
		kind string
		m    *bus.Message
		err  error
	}
	events := make(chan item)
	for _, w := range watched {
		if !slices.Contains(kinds, w.kind) {
			continue
		}
		filter := bus.RewardFilter(run, "*", "*")
		if w.filter != "" {
			filter = schemas.Prefix + fmt.Sprintf(w.filter, run)
		}
		go func() {
			for m, err := range conn.Read(ctx, w.stream, []string{filter}, options) {
				select {
				case events <- item{w.kind, m, err}:
				case <-ctx.Done():
					return
				}
			}
		}()
	}
	for n := 0; count == 0 || n < count; {
		select {
		case <-ctx.Done():
			return nil
		case e := <-events:
			if errors.Is(e.err, context.Canceled) {
				return nil
			}
			if e.err != nil {
				return fmt.Errorf("watch %s: %w", e.kind, e.err)
			}
			line, owner, err := describe(e.kind, e.m)
			if err != nil {
				line = "unreadable: " + err.Error()
			}
			if line == "" || uid != "" && owner != uid {
				continue
			}
			n++
			if a.json {
				err = json.NewEncoder(out).Encode(map[string]any{
					"kind": e.kind, "subject": e.m.Subject, "seq": e.m.Seq, "time": e.m.Time.UnixNano(), "event": jsonOfBytes(e.m.Data),
				})
			} else {
				_, err = fmt.Fprintf(out, "%s  %-10s %s\n", e.m.Time.Local().Format("15:04:05.000"), e.kind, line)
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// describe is one event in one line, and the uid it belongs to. Parts of a step
// have no line.
func describe(kind string, m *bus.Message) (line, uid string, err error) {
	switch kind {
	case "prompt":
		var e schemas.Prompt
		err = schemas.Decode(m.Data, &e)
		return fmt.Sprintf("%s %q", e.UID, e.Prompt), e.UID, err
	case "step":
		if schemas.IsPart(m.Subject) {
			return "", "", nil
		}
		var e schemas.Step
		err = schemas.Decode(m.Data, &e)
		kept := make([]string, len(e.Latents))
		for i, l := range e.Latents {
			kept[i] = fmt.Sprint(l.Index)
		}
		line = fmt.Sprintf("%s #%d step %d/%d %-4s sigma %.4f -> %.4f  log_prob %s", e.UID, e.SampleIndex, e.StepIndex+1, e.NumInferenceSteps,
			e.Transition, e.Sigma, e.SigmaNext, number(e.LogProb, "%.6f"))
		if len(kept) > 0 {
			line += "  latents " + strings.Join(kept, ",")
		}
		return line, e.UID, err
	case "trajectory":
		var e schemas.Trajectory
		err = schemas.Decode(m.Data, &e)
		return strings.TrimSpace(fmt.Sprintf("%s #%d %s, %d steps in %v %s", e.UID, e.SampleIndex, e.StopReason, len(e.Steps),
			time.Duration(e.Timings.Finished-e.Timings.Started).Round(time.Millisecond), e.Error)), e.UID, err
	case "reward":
		var e schemas.Reward
		err = schemas.Decode(m.Data, &e)
		return strings.TrimSpace(fmt.Sprintf("%s #%d %s %s %s", e.UID, e.SampleIndex, e.Status, number(e.Reward, "%.4f"), e.Error)), e.UID, err
	case "advantage":
		var e schemas.Advantage
		err = schemas.Decode(m.Data, &e)
		cells := make([]string, len(e.Members))
		for i, member := range e.Members {
			cells[i] = number(member.Advantage, "%+.2f")
		}
		return fmt.Sprintf("%s %s mean %s std %s  [%s]", e.UID, e.Status, number(e.Mean, "%.4f"), number(e.Std, "%.4f"), strings.Join(cells, " ")), e.UID, err
	case "batch":
		var e schemas.Batch
		err = schemas.Decode(m.Data, &e)
		return fmt.Sprintf("%s closed: %d groups, %d samples, mean %s", e.Batch, e.Groups, e.Samples, number(e.Mean, "%.4f")), "", err
	default:
		var e schemas.Dead
		err = schemas.Decode(m.Data, &e)
		return fmt.Sprintf("%d at %s, %s: %s", m.Seq, e.Stage, e.Code, firstLine(e.Reason)), e.UID, err
	}
}
