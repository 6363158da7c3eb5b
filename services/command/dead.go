package command

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/boot"
	"github.com/meander-rl/meander/services/internal/present"
)

// deadCommand makes the command 'meander dead' with its subcommands.
func deadCommand(a *app) *cobra.Command {
	c := &cobra.Command{
		Use:   "dead",
		Short: "list, replay or drop input that no service could process",
		Long: `A service that cannot use its input stores it in the dead-letter stream, with all bytes, headers and
the reason. dead lists these letters, and publishes or removes them.`,
		Example: `  meander dead ls
  meander dead show 12
  meander dead replay 12     # when the cause is fixed
  meander dead drop 12`,
	}
	c.AddCommand(a.deadListCommand(), a.deadShowCommand(), a.deadReplayCommand(), a.deadDropCommand())
	return c
}

// deadListCommand makes the command 'meander dead ls'.
func (a *app) deadListCommand() *cobra.Command {
	var run schemas.Run
	c := &cobra.Command{
		Use: "ls", Short: "list dead letters, oldest first",
		Example: "  meander dead ls --run demo --json",
		RunE: a.withBus(func(c *cobra.Command, conn *connection, _ []string) error {
			return a.listDead(c, conn, run)
		}),
	}
	nameFlag(c.Flags(), &run, "run", "*", "only this run")
	return c
}

func (a *app) deadShowCommand() *cobra.Command {
	return &cobra.Command{
		Use: "show ID", Short: "show one dead letter with its original",
		Example: "  meander dead show 12",
		RunE:    a.withLetters(a.showDead),
	}
}

// deadReplayCommand makes the command 'meander dead replay'.
func (a *app) deadReplayCommand() *cobra.Command {
	return &cobra.Command{
		Use: "replay ID ...", Short: "publish originals again on their subjects",
		Long: `replay publishes the original bytes again, with a new message id, and removes the dead letter. If a
stream holds one event for each subject and another event has the subject now, replay fails: that event and
the dead letter stay.`,
		Example: "  meander dead replay 12 13",
		RunE: a.withLetters(func(c *cobra.Command, conn *connection, m *bus.Message) error {
			ack, subject, err := conn.Replay(c.Context(), m.Seq)
			if err == nil {
				fmt.Fprintf(c.OutOrStdout(), "replayed %d: %s, stream %s, sequence %d\n", m.Seq, subject, ack.Stream,
					ack.Seq)
			}
			return err
		}),
	}
}

// deadDropCommand makes the command 'meander dead drop'.
func (a *app) deadDropCommand() *cobra.Command {
	return &cobra.Command{
		Use: "drop ID ...", Short: "remove dead letters for ever",
		Example: "  meander dead drop 12",
		RunE: a.withLetters(func(c *cobra.Command, conn *connection, m *bus.Message) error {
			if err := conn.Delete(c.Context(), schemas.StreamDead, m.Seq); err != nil {
				return fmt.Errorf("drop %d: %w", m.Seq, err)
			}
			fmt.Fprintf(c.OutOrStdout(), "dropped %d\n", m.Seq)
			return nil
		}),
	}
}

// listDead prints a line for each dead letter of a run ("*": of all runs). Letters that cannot be read are listed, too.
func (a *app) listDead(c *cobra.Command, conn *connection, run schemas.Run) error {
	t := present.New("ID", "WHEN", "SERVICE", "CODE", "RUN", "UID", "REASON")
	n := 0
	for m, err := range conn.Read(c.Context(), schemas.StreamDead,
		[]string{schemas.Address{Kind: schemas.KindDead, Run: run}.Filter()}, bus.ReadOptions{}) {
		if err != nil {
			return fmt.Errorf("read dead letters: %w", err)
		}
		n++
		l, d := view.LetterOf(m) // any user may write there: show the other letters
		if a.json {
			v := letterJSON(m, d)
			if d == nil {
				v["error"] = l.Reason
			}
			if err := encode(c.OutOrStdout(), v); err != nil {
				return err
			}
			continue
		}
		t.Row(m.Seq, m.Time.Local().Format(time.DateTime), present.OrDash(l.Stage), l.Code, present.OrDash(l.Run),
			present.OrDash(l.UID), present.FirstLine(l.Reason))
	}
	switch {
	case a.json:
	case n == 0:
		fmt.Fprintln(c.ErrOrStderr(), "no dead letters")
	default:
		t.Print(c.OutOrStdout())
	}
	return nil
}

// letterJSON returns a dead letter, whose message is m, for --json; d is nil where it cannot be read.
func letterJSON(m *bus.Message, d *schemas.Dead) map[string]any {
	v := map[string]any{}
	if d != nil {
		v = schemas.JSON(d).(map[string]any)
	}
	v["id"] = m.Seq
	return v
}

// showDead prints a dead letter, whose message is m, with the original message, wherever that is stored.
func (a *app) showDead(c *cobra.Command, conn *connection, m *bus.Message) error {
	l, d := view.LetterOf(m)
	data, err := []byte(nil), errors.New(l.Reason)
	if d != nil {
		data, err = conn.DeadData(c.Context(), d)
	}
	out := c.OutOrStdout()
	if a.json {
		v := letterJSON(m, d)
		if v["original"] = original(data); err != nil {
			v["error"], v["original"] = err.Error(), nil
		}
		return encode(out, v)
	}
	fmt.Fprintf(out, "dead letter %d\n", m.Seq)
	field := func(name string, value any) {
		fmt.Fprintf(out, "%-12s%s\n", name, boot.Safe(fmt.Sprint(value)))
	}
	if d == nil {
		field("unreadable", err)
		field("subject", m.Subject)
		field("bytes", fmt.Sprintf("%x", m.Data[:min(len(m.Data), 256)]))
		return nil
	}
	field("stage", d.Service)
	field("code", d.Code)
	field("reason", d.Reason)
	field("", "-> "+l.Fix)
	field("subject", d.OriginalSubject)
	field("stream", fmt.Sprint(d.Stream, " ", d.StreamSeq))
	field("deliveries", d.Deliveries)
	field("at", time.Unix(0, d.At).Local().Format(time.RFC3339))
	for _, h := range d.Headers {
		field("header", h.Name+": "+h.Value)
	}
	if err != nil {
		field("original", fmt.Sprintf("not available: %v", err))
		return nil
	}
	text, err := json.MarshalIndent(original(data), "", "  ")
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "original, %d bytes:\n%s\n", len(data), text)
	return err
}

// withLetters returns the RunE of a command that does something with each dead letter of which the id is given, as
// 'meander dead ls' shows it. A letter may be unreadable; one that there is not is a usage error.
func (a *app) withLetters(do func(c *cobra.Command, conn *connection, m *bus.Message) error) runE {
	return a.withBus(func(c *cobra.Command, conn *connection, given []string) error {
		for _, id := range given {
			seq, err := strconv.ParseUint(id, 10, 64) // in the stream
			if err != nil || seq == 0 {
				return usage(fmt.Errorf("%q is not the number of a dead letter; 'meander dead ls' lists them", id))
			}
			m, err := conn.Get(c.Context(), schemas.StreamDead, seq)
			if errors.Is(err, bus.ErrNotFound) {
				return usage(fmt.Errorf("there is no dead letter %d; 'meander dead ls' lists them", seq))
			}
			if err != nil {
				return fmt.Errorf("dead letter %d: %w", seq, err)
			}
			if err := do(c, conn, m); err != nil {
				return err
			}
		}
		return nil
	})
}

// original returns the refused bytes for JSON: decoded if they are sound msgpack, else in hex.
func original(data []byte) any {
	if schemas.Precheck(data) == nil {
		return schemas.JSONOfBytes(data)
	}
	return map[string]string{"not_msgpack_hex": fmt.Sprintf("%x", data[:min(len(data), 256)])}
}
