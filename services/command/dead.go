package command

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

func deadCommand(a *app) *cobra.Command {
	c := &cobra.Command{
		Use:   "dead",
		Short: "look at, replay or drop what could not be processed",
		Long: `Input that a service could not use is never lost: its bytes and headers go to the
dead-letter stream with the reason.`,
		Example: `  meander dead ls
  meander dead show 12
  meander dead replay 12     # after the cause is gone
  meander dead drop 12`,
		Args: args(noSuchCommand),
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(a.deadListCommand(), a.deadShowCommand(), a.deadReplayCommand(), a.deadDropCommand())
	return c
}

func (a *app) deadListCommand() *cobra.Command {
	var run schemas.Run
	c := &cobra.Command{
		Use: "ls", Short: "list dead letters, oldest first", Args: args(cobra.NoArgs),
		Example: "  meander dead ls --run demo --json",
		RunE: a.withBus(func(c *cobra.Command, conn *connection, _ []string) error {
			if err := optionalToken("--run", runFilter(run)); err != nil {
				return err
			}
			return a.listDead(c, conn, run)
		}),
	}
	c.Flags().StringVar((*string)(&run), "run", "*", "only this run")
	return c
}

func (a *app) deadShowCommand() *cobra.Command {
	return &cobra.Command{
		Use: "show ID", Short: "show one dead letter with its original", Args: args(cobra.ExactArgs(1)),
		Example: "  meander dead show 12",
		RunE: a.withBus(func(c *cobra.Command, conn *connection, given []string) error {
			m, err := deadLetter(c, conn, given[0])
			if err != nil {
				return err
			}
			return a.showDead(c, conn, m)
		}),
	}
}

func (a *app) deadReplayCommand() *cobra.Command {
	return &cobra.Command{
		Use: "replay ID ...", Short: "publish originals again on their subjects", Args: args(cobra.MinimumNArgs(1)),
		Long: `replay publishes the original bytes again under a new message id and removes the dead
letter. Where a stream holds one event per subject, the original takes its own place
again; a subject that another event has taken meanwhile is left alone.`,
		Example: "  meander dead replay 12 13",
		RunE: a.withBus(func(c *cobra.Command, conn *connection, given []string) error {
			for _, id := range given {
				m, err := deadLetter(c, conn, id)
				if err != nil {
					return err
				}
				ack, subject, err := conn.Replay(c.Context(), m.Seq)
				if err != nil {
					return err
				}
				fmt.Fprintf(c.OutOrStdout(), "replayed %s: %s, stream %s, sequence %d\n", id, subject, ack.Stream, ack.Seq)
			}
			return nil
		}),
	}
}

func (a *app) deadDropCommand() *cobra.Command {
	return &cobra.Command{
		Use: "drop ID ...", Short: "remove dead letters for good", Args: args(cobra.MinimumNArgs(1)),
		Example: "  meander dead drop 12",
		RunE: a.withBus(func(c *cobra.Command, conn *connection, given []string) error {
			for _, id := range given {
				m, err := deadLetter(c, conn, id)
				if err != nil {
					return err
				}
				if err := conn.Delete(c.Context(), schemas.StreamDead, m.Seq); err != nil {
					return fmt.Errorf("drop %s: %w", id, err)
				}
				fmt.Fprintf(c.OutOrStdout(), "dropped %s\n", id)
			}
			return nil
		}),
	}
}

// listDead prints a line for each letter of a run ("*": of all).
func (a *app) listDead(c *cobra.Command, conn *connection, run schemas.Run) error {
	t := newColumns(c.OutOrStdout())
	if !a.json {
		fmt.Fprintln(t, "ID\tWHEN\tSTAGE\tCODE\tRUN\tUID\tREASON")
	}
	n := 0
	for m, err := range conn.Read(c.Context(), schemas.StreamDead, []string{schemas.Address{Kind: schemas.KindDead, Run: run}.Filter()}, bus.ReadOptions{}) {
		if err != nil {
			return fmt.Errorf("read dead letters: %w", err)
		}
		n++
		d, err := readDead(m)
		if a.json {
			v := map[string]any{"id": m.Seq}
			if err != nil {
				v["error"] = err.Error()
			} else {
				v = schemas.JSON(d).(map[string]any)
				v["id"] = m.Seq
			}
			if err := json.NewEncoder(c.OutOrStdout()).Encode(v); err != nil {
				return err
			}
			continue
		}
		if err != nil { // anyone may write there; the others are to be seen all the same
			d = &schemas.Dead{Code: "unreadable", Reason: err.Error()}
			d.Run, _ = schemas.RunOf(m.Subject)
		}
		fmt.Fprintf(t, "%d\t%s\t%s\t%s\t%s\t%s\t%s\n", m.Seq, m.Time.Local().Format(time.DateTime), orDash(d.Stage), d.Code, orDash(d.Run), orDash(d.UID), firstLine(d.Reason))
	}
	if n == 0 && !a.json {
		fmt.Fprintln(c.ErrOrStderr(), "no dead letters")
		return nil
	}
	return t.Flush()
}

// showDead prints a letter and its original, wherever that is.
func (a *app) showDead(c *cobra.Command, conn *connection, m *bus.Message) error {
	d, err := readDead(m)
	var data []byte
	if err == nil {
		data, err = conn.DeadData(c.Context(), d)
	}
	out := c.OutOrStdout()
	if a.json {
		v := map[string]any{}
		if d != nil {
			v = schemas.JSON(d).(map[string]any)
			v["original"] = original(data)
		}
		v["id"] = m.Seq
		if err != nil {
			v["error"], v["original"] = err.Error(), nil
		}
		return json.NewEncoder(out).Encode(v)
	}
	if d == nil {
		_, err = fmt.Fprintf(out, "dead letter %d\nunreadable  %s\nsubject     %s\nbytes       %x\n", m.Seq, err, m.Subject, m.Data[:min(len(m.Data), 256)])
		return err
	}
	fmt.Fprintf(out, "dead letter %d\nstage       %s\ncode        %s\nreason      %s\nsubject     %s\nstream      %s %d\ndeliveries  %d\nat          %s\n",
		m.Seq, d.Stage, d.Code, d.Reason, d.OriginalSubject, d.Stream, d.StreamSeq, d.Deliveries, time.Unix(0, d.At).Local().Format(time.RFC3339))
	for _, h := range d.Headers {
		fmt.Fprintf(out, "header      %s: %s\n", h.Name, h.Value)
	}
	if err != nil {
		_, err = fmt.Fprintf(out, "original    not to be had: %s\n", err)
		return err
	}
	text, err := json.MarshalIndent(original(data), "", "  ")
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "original, %d bytes:\n%s\n", len(data), text)
	return err
}

// deadLetter is the message of a letter, which may be unreadable.
func deadLetter(c *cobra.Command, conn *connection, id string) (*bus.Message, error) {
	seq, err := letterNumber(id)
	if err != nil {
		return nil, err
	}
	m, err := conn.Get(c.Context(), schemas.StreamDead, seq)
	if errors.Is(err, bus.ErrNotFound) {
		return nil, usage(fmt.Errorf("there is no dead letter %d; 'meander dead ls' lists those there are", seq))
	}
	if err != nil {
		return nil, fmt.Errorf("dead letter %d: %w", seq, err)
	}
	return m, nil
}

func letterNumber(id string) (uint64, error) {
	seq, err := strconv.ParseUint(id, 10, 64)
	if err != nil || seq == 0 {
		return 0, usage(fmt.Errorf("%q is not the number of a dead letter; 'meander dead ls' lists them", id))
	}
	return seq, nil
}

func readDead(m *bus.Message) (*schemas.Dead, error) {
	d := &schemas.Dead{}
	if err := schemas.Decode(m.Data, d); err != nil {
		return nil, err
	}
	return d, nil
}

// original is the refused payload: decoded if it is sound msgpack, else its bytes in hex.
func original(data []byte) any {
	if schemas.Precheck(data) == nil {
		return schemas.JSONOfBytes(data)
	}
	return map[string]string{"not_msgpack_hex": fmt.Sprintf("%x", data[:min(len(data), 256)])}
}

func orDash[S ~string](s S) string {
	return cmp.Or(string(s), "-")
}
