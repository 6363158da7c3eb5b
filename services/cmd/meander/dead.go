package main

import (
	"encoding/json"
	"fmt"
	"strconv"
	"text/tabwriter"
	"time"

	"github.com/nats-io/nats.go"
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
	var run string
	ls := &cobra.Command{
		Use: "ls", Short: "list dead letters, oldest first", Args: args(cobra.NoArgs),
		Example: "  meander dead ls --run demo --json",
		RunE: a.withBus(func(c *cobra.Command, conn *connection, _ []string) error {
			t := tabwriter.NewWriter(c.OutOrStdout(), 0, 4, 2, ' ', 0)
			if !a.json {
				fmt.Fprintln(t, "ID\tWHEN\tSTAGE\tCODE\tRUN\tUID\tREASON")
			}
			n := 0
			for m, err := range conn.Read(c.Context(), schemas.StreamDead, []string{schemas.Prefix + "dead.*." + run + ".*"}, bus.ReadOptions{}) {
				if err != nil {
					return fmt.Errorf("read dead letters: %w", err)
				}
				n++
				var d schemas.Dead
				if err := schemas.Decode(m.Data, &d); err != nil {
					return fmt.Errorf("dead letter %d: %w", m.Seq, err)
				}
				if a.json {
					v := jsonOf(&d).(map[string]any)
					v["id"] = m.Seq
					if err := json.NewEncoder(c.OutOrStdout()).Encode(v); err != nil {
						return err
					}
					continue
				}
				fmt.Fprintf(t, "%d\t%s\t%s\t%s\t%s\t%s\t%s\n", m.Seq, m.Time.Local().Format(time.DateTime), d.Stage, d.Code, orDash(d.Run), orDash(d.UID), firstLine(d.Reason))
			}
			if n == 0 && !a.json {
				fmt.Fprintln(c.ErrOrStderr(), "no dead letters")
				return nil
			}
			return t.Flush()
		}),
	}
	ls.Flags().StringVar(&run, "run", "*", "only this run")
	show := &cobra.Command{
		Use: "show ID", Short: "show one dead letter with its original", Args: args(cobra.ExactArgs(1)),
		Example: "  meander dead show 12",
		RunE: a.withBus(func(c *cobra.Command, conn *connection, given []string) error {
			m, d, err := deadLetter(c, conn, given[0])
			if err != nil {
				return err
			}
			if a.json {
				v := jsonOf(d).(map[string]any)
				v["id"], v["original"] = m.Seq, original(d)
				return json.NewEncoder(c.OutOrStdout()).Encode(v)
			}
			out := c.OutOrStdout()
			fmt.Fprintf(out, "dead letter %d\nstage       %s\ncode        %s\nreason      %s\nsubject     %s\nstream      %s %d\ndeliveries  %d\nat          %s\n",
				m.Seq, d.Stage, d.Code, d.Reason, d.OriginalSubject, d.Stream, d.StreamSeq, d.Deliveries, time.Unix(0, d.At).Local().Format(time.RFC3339))
			for _, h := range d.Headers {
				fmt.Fprintf(out, "header      %s: %s\n", h.Name, h.Value)
			}
			data, err := json.MarshalIndent(original(d), "", "  ")
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(out, "original, %d bytes:\n%s\n", len(d.Data), data)
			return err
		}),
	}
	replay := &cobra.Command{
		Use: "replay ID ...", Short: "publish originals again on their subjects", Args: args(cobra.MinimumNArgs(1)),
		Long:    "replay publishes the original bytes again under a new message id and removes the dead letter.",
		Example: "  meander dead replay 12 13",
		RunE: a.withBus(func(c *cobra.Command, conn *connection, given []string) error {
			for _, id := range given {
				m, d, err := deadLetter(c, conn, id)
				if err != nil {
					return err
				}
				header := nats.Header{}
				for _, h := range d.Headers {
					if h.Name != nats.MsgIdHdr && h.Name != schemas.HeaderReply {
						header.Add(h.Name, h.Value)
					}
				}
				ack, err := conn.PublishRaw(c.Context(), d.OriginalSubject, d.Data, header, fmt.Sprintf("replay.%d.%d", m.Seq, d.At))
				if err != nil {
					return fmt.Errorf("replay %s: %w", id, err)
				}
				if err := conn.Delete(c.Context(), schemas.StreamDead, m.Seq); err != nil {
					return fmt.Errorf("replayed %s as %s %d, but could not remove it: %w", id, ack.Stream, ack.Seq, err)
				}
				fmt.Fprintf(c.OutOrStdout(), "replayed %s: %s, stream %s, sequence %d\n", id, d.OriginalSubject, ack.Stream, ack.Seq)
			}
			return nil
		}),
	}
	drop := &cobra.Command{
		Use: "drop ID ...", Short: "remove dead letters for good", Args: args(cobra.MinimumNArgs(1)),
		Example: "  meander dead drop 12",
		RunE: a.withBus(func(c *cobra.Command, conn *connection, given []string) error {
			for _, id := range given {
				m, _, err := deadLetter(c, conn, id)
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
	c.AddCommand(ls, show, replay, drop)
	return c
}

// withBus opens the pipeline for a command that reads what is stored.
func (a *app) withBus(f func(c *cobra.Command, conn *connection, given []string) error) func(*cobra.Command, []string) error {
	return func(c *cobra.Command, given []string) error {
		log, err := a.logger()
		if err != nil {
			return err
		}
		conn, err := a.openExisting(c.Context(), log)
		if err != nil {
			return err
		}
		defer conn.Close()
		return f(c, conn, given)
	}
}

func deadLetter(c *cobra.Command, conn *connection, id string) (*bus.Message, *schemas.Dead, error) {
	seq, err := strconv.ParseUint(id, 10, 64)
	if err != nil || seq == 0 {
		return nil, nil, usage(fmt.Errorf("%q is not the number of a dead letter; 'meander dead ls' lists them", id))
	}
	m, err := conn.Get(c.Context(), schemas.StreamDead, seq)
	if err != nil {
		return nil, nil, fmt.Errorf("dead letter %d: %w", seq, err)
	}
	var d schemas.Dead
	if err := schemas.Decode(m.Data, &d); err != nil {
		return nil, nil, fmt.Errorf("dead letter %d: %w", seq, err)
	}
	return m, &d, nil
}

// original is the refused payload: decoded if it is sound msgpack, else its bytes in hex.
func original(d *schemas.Dead) any {
	if schemas.Precheck(d.Data) == nil {
		return jsonOfBytes(d.Data)
	}
	return map[string]string{"not_msgpack_hex": fmt.Sprintf("%x", d.Data[:min(len(d.Data), 256)])}
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
