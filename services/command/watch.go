package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/export"
	"github.com/meander-rl/meander/pkg/outcomes"
	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/present"
)

// watchedKind is a kind of events that watch prints.
type watchedKind struct {
	kind, stream string
	event        func() schemas.Event
}

// watched are the kinds of events, in the order in which data flow.
var watched = []watchedKind{
	{schemas.KindPrompt, schemas.StreamPrompts, func() schemas.Event { return &schemas.Prompt{} }},
	{schemas.KindControl, schemas.StreamControl, func() schemas.Event { return &schemas.Control{} }},
	{schemas.KindStep, schemas.StreamSteps, func() schemas.Event { return &schemas.Step{} }},
	{schemas.KindTokens, schemas.StreamSteps, func() schemas.Event { return &schemas.Tokens{} }},
	{schemas.KindTrajectory, schemas.StreamTrajectories, func() schemas.Event { return &schemas.Trajectory{} }},
	{schemas.KindReward, schemas.StreamRewards, func() schemas.Event { return &schemas.Reward{} }},
	{schemas.KindAdvantage, schemas.StreamAdvantages, func() schemas.Event { return &schemas.Advantage{} }},
	{schemas.KindBatch, schemas.StreamAdvantages, func() schemas.Event { return &schemas.Batch{} }},
	{schemas.KindUpdate, schemas.StreamUpdates, func() schemas.Event { return &schemas.Update{} }},
	{schemas.KindAlarm, schemas.StreamUpdates, func() schemas.Event { return &schemas.Alarm{} }},
	{schemas.KindDead, schemas.StreamDead, func() schemas.Event { return &schemas.Dead{} }},
}

type watcher struct {
	*app
	run     schemas.Run
	uid     schemas.UID
	kinds   []string
	Since   time.Duration `key:"since" range:"0s.." help:"begin with events of this long ago, e.g. 10m"`
	All     bool          `key:"all" help:"begin with the oldest stored event, also without --run"`
	Live    bool          `key:"live" help:"print new events only, also with --run or --uid"`
	Count   int           `key:"count" range:"0.." help:"stop after this many events; 0: no limit"`
	printed int
	fresh   bool // without the stored events
}

// watchCommand makes the command 'meander watch'.
func watchCommand(a *app) *cobra.Command {
	w := &watcher{app: a}
	names := make([]string, len(watched))
	for i, w := range watched {
		names[i] = w.kind
	}
	c := &cobra.Command{
		Use:   "watch",
		Short: "print events, one line each: the stored ones, then new ones",
		Long: `watch follows a pipeline and prints one line for each event, until it is interrupted. With --run or
--uid it begins with the stored events; without them it prints new events only. It reads from the
streams, so it does not slow the pipeline down.`,
		Example: `  meander watch
  meander watch --run demo --kinds trajectory,reward,advantage
  meander watch --run demo --uid 0000-a-red-sign-that-says-open --json
  meander watch --since 10m --count 100`,
		PreRunE: func(*cobra.Command, []string) error {
			for _, k := range w.kinds {
				if !slices.Contains(names, k) {
					return usage(oneOf("kinds", k, names))
				}
			}
			return nil
		},
		RunE: a.withView(func(c *cobra.Command, conn *connection, _ []string) error {
			from := bus.ReadOptions{}
			switch named := w.run != "*" || w.uid != ""; {
			case c.Flags().Changed("since"):
				from.FromTime = time.Now().Add(-w.Since)
			case w.Live || !named && !w.All:
				from.FromTime = time.Now()
				w.fresh = true
			}
			fmt.Fprintf(c.ErrOrStderr(), "watching %s; Ctrl-C ends\n", conn.where)
			return w.watch(c.Context(), conn, from, c.OutOrStdout(), c.ErrOrStderr())
		}),
	}
	f := c.Flags()
	nameFlag(f, &w.run, "run", "*", "only this run")
	nameFlag(f, &w.uid, "uid", "", "only this group")
	f.StringSliceVar(&w.kinds, "kinds", names, "kinds of events to print")
	flagsOf(c, w)
	c.MarkFlagsMutuallyExclusive("since", "all", "live")
	return c
}

var errEnough = errors.New("enough")

// watch prints the stored events, then new ones, until ctx ends or --count events are printed.
func (w *watcher) watch(ctx context.Context, conn *connection, from bus.ReadOptions, out, stderr io.Writer) error {
	var sources []*export.Source
	for _, k := range watched {
		if slices.Contains(w.kinds, k.kind) {
			filter := schemas.Address{Kind: k.kind, Run: w.run}.Filter()
			sources = append(sources, &export.Source{Stream: k.stream, Filters: []string{filter}, From: from})
		}
	}
	err := w.printAll(export.Merge(ctx, conn.Bus, sources), out)
	if err == nil {
		told := present.Count(w.printed, "event") + " stored; waiting for new ones"
		if w.fresh {
			told = "waiting for new events; --all begins with the stored ones"
		}
		if w.run != "*" {
			if state, err := runState(ctx, conn.Bus, w.run, stderr); err == nil && state != "" { // else events say it
				told = state + "; " + told
			}
		}
		fmt.Fprintln(stderr, told)
		err = w.printAll(live(ctx, conn.Bus, sources...), out)
	}
	if errors.Is(err, errEnough) || ctx.Err() != nil {
		return nil
	}
	return err
}

// printAll prints events: the stored ones in the order in which they were stored, or new ones as they come. The error
// is errEnough, or of the server.
func (w *watcher) printAll(events iter.Seq2[*bus.Message, error], out io.Writer) error {
	for m, err := range events {
		if err == nil {
			err = w.print(m, out)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// live yields the events of several sources, those from where each begins and new ones, as they come: until ctx ends,
// or with the error that the server ends one with.
func live(ctx context.Context, b *bus.Bus, sources ...*export.Source) iter.Seq2[*bus.Message, error] {
	type item struct {
		m   *bus.Message
		err error
	}
	return func(yield func(*bus.Message, error) bool) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		events := make(chan item)
		for _, s := range sources {
			from := s.From
			from.Live = true
			go func() {
				for m, err := range b.Read(ctx, s.Stream, s.Filters, from) {
					select {
					case events <- item{m, err}:
					case <-ctx.Done():
						return
					}
				}
			}()
		}
		for {
			select {
			case <-ctx.Done():
				return
			case e := <-events:
				if !yield(e.m, e.err) || e.err != nil {
					return
				}
			}
		}
	}
}

// print prints an event, unless it is not asked for. It returns errEnough after --count events.
func (w *watcher) print(m *bus.Message, out io.Writer) error {
	a, _ := schemas.ParseSubject(m.Subject)
	line, owner, err := eventLine(a.Kind, m)
	if err != nil {
		line = "unreadable: " + err.Error()
	}
	if line == "" || w.uid != "" && owner != w.uid {
		return nil
	}
	if err := w.printEvent(out, a.Kind, m, line); err != nil {
		return err
	}
	if w.printed++; w.Count > 0 && w.printed >= w.Count {
		return errEnough
	}
	return nil
}

// printEvent prints an event: line, with its time and kind, or as JSON.
func (a *app) printEvent(out io.Writer, kind string, m *bus.Message, line string) (err error) {
	if a.json {
		return encode(out, map[string]any{
			"kind": kind, "subject": m.Subject, "seq": m.Seq, "time": m.Time.UnixNano(),
			"event": schemas.JSONOfBytes(m.Data),
		})
	}
	_, err = fmt.Fprintf(out, "%s  %-10s %s\n", m.Time.Local().Format("15:04:05.000"), kind, line)
	return err
}

// eventLine returns an event as one line, with the uid that it belongs to. Parts of a step have no line. An error means
// that the bytes do not decode.
func eventLine(kind string, m *bus.Message) (line string, uid schemas.UID, err error) {
	i := slices.IndexFunc(watched, func(w watchedKind) bool { return w.kind == kind })
	switch {
	case i < 0: // of those that only a replay has
		return strings.TrimPrefix(m.Subject, schemas.KindPrefix(kind)), "", nil
	case schemas.IsPart(m.Subject):
		return "", "", nil
	}
	a, _ := schemas.ParseSubject(m.Subject)
	uid = a.UID
	decoded := watched[i].event()
	err = schemas.Decode(m.Data, decoded)
	switch e := decoded.(type) {
	case *schemas.Prompt:
		text := e.Prompt
		if n := len(e.Messages); n > 0 {
			text = e.Messages[n-1].Content
		}
		line, uid = fmt.Sprintf("%s %q", e.UID, text), e.UID
	case *schemas.Control:
		line, uid = describeControl(e), e.UID
	case *schemas.Step:
		var kept []string
		for _, l := range e.Latents {
			kept = append(kept, fmt.Sprint(l.Index))
		}
		line = fmt.Sprintf("%s #%v step %d/%d %-4s sigma %.4f -> %.4f  log_prob %s", e.UID, e.Place(),
			e.StepIndex+1, e.NumInferenceSteps, e.Transition, e.Sigma, e.SigmaNext, results.Number(e.LogProb, "%.6f"))
		line += present.When(kept != nil, "  latents %s", strings.Join(kept, ",")) +
			present.When(e.Checkpoint != nil, "  checkpoint")
	case *schemas.Tokens:
		line = tokensLine(e)
	case *schemas.Trajectory:
		line = trajectoryLine(e)
	case *schemas.Reward:
		line = fmt.Sprintf("%s #%d %s %s %s", e.UID, e.SampleIndex, e.Status, results.Number(e.Reward, "%.4f"), e.Error)
	case *schemas.Advantage:
		var cells []string
		for _, member := range e.Members {
			cells = append(cells, results.Number(member.Advantage, "%+.2f"))
		}
		line = fmt.Sprintf("%s %s mean %s std %s  %v", e.UID, outcomes.Group(e), results.Number(e.Mean, "%.4f"),
			results.Number(e.Std, "%.4f"), cells)
		for _, c := range e.Credits {
			cells = nil
			for _, v := range c.Values {
				cells = append(cells, results.Number(v, "%+.2f"))
			}
			line += fmt.Sprintf("  %s %v", strings.TrimSpace(string(c.Stage)+" "+c.Track), cells)
		}
	case *schemas.Batch:
		line = fmt.Sprintf("%s closed: %s, %s, mean %s", e.Batch, present.Count(e.Groups, "group"),
			present.Count(e.Samples, "sample"), results.Number(e.Mean, "%.4f"))
	case *schemas.Update:
		line = fmt.Sprintf("%s update %d by %s: version %d", e.Lineage(), e.Step, e.Trainer, e.PolicyVersion)
		for _, number := range e.Numbers() {
			line += fmt.Sprintf(", %s %.4g", number.Name, number.Value)
		}
	case *schemas.Alarm:
		line = fmt.Sprintf("rule %s: %s", e.Rule, e.Says) + present.When(e.Paused, "; the run is paused")
	case *schemas.Dead:
		line = fmt.Sprintf("%d at %s, %s: %s", m.Seq, e.Service, e.Code, present.FirstLine(e.Reason))
	}
	return strings.TrimSpace(line), uid, err
}

// trajectoryLine is eventLine for a sample that has ended.
func trajectoryLine(e *schemas.Trajectory) string {
	n := len(e.Attempts())
	took := time.Duration(e.Timings.Finished - e.Timings.Started).Round(time.Millisecond)
	if e.Text != nil && e.StopReason == schemas.StopCompleted {
		made := present.Count(e.Text.Generated(), "token")
		if e.Text.SaidBy != "" {
			made = "said by " + e.Text.SaidBy
		}
		return fmt.Sprintf("%s #%v %s, %s in %v %s", e.UID, e.Place(), e.StopReason, made, took,
			conversationLine(e.Text.Turns))
	}
	return strings.TrimSpace(fmt.Sprintf("%s #%v %s, %d steps%s in %v %s", e.UID, e.Place(), e.StopReason,
		len(e.Steps), present.When(n > 1, " of %d attempts, the last", n), took, e.Error))
}
