package main

import (
	"encoding/json"
	"fmt"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
)

func streamsCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "streams", Short: "sizes of the streams and how far their consumers are behind", Args: args(cobra.NoArgs),
		Example: "  meander streams --nats nats://127.0.0.1:4222",
		RunE: a.withBus(func(c *cobra.Command, conn *connection, _ []string) error {
			stats, err := conn.Stats(c.Context())
			if err != nil {
				return err
			}
			out := c.OutOrStdout()
			if a.json {
				for _, s := range stats {
					if err := json.NewEncoder(out).Encode(s); err != nil {
						return err
					}
				}
				return nil
			}
			t := tabwriter.NewWriter(out, 0, 4, 2, ' ', 0)
			fmt.Fprintln(t, "STREAM\tMESSAGES\tBYTES\tLIMIT\tNEWEST")
			for _, s := range stats {
				newest := "-"
				if !s.Newest.IsZero() {
					newest = time.Since(s.Newest).Round(time.Second).String() + " ago"
				}
				fmt.Fprintf(t, "%s\t%d\t%s\t%s\t%s\n", s.Name, s.Messages, size(int64(s.Bytes)), size(s.MaxBytes), newest)
			}
			fmt.Fprintln(t, "\nCONSUMER\tSTREAM\tWAITING\tIN HAND\tREDELIVERED")
			for _, s := range stats {
				for _, k := range s.Consumers {
					fmt.Fprintf(t, "%s\t%s\t%d\t%d\t%d\n", k.Name, s.Name, k.Pending, k.AckPending, k.Redelivered)
				}
			}
			return t.Flush()
		}),
	}
}

// size is a number of bytes for people.
func size(n int64) string {
	if n <= 0 {
		return "-"
	}
	units := []string{"B", "KiB", "MiB", "GiB", "TiB"}
	v, u := float64(n), 0
	for v >= 1024 && u < len(units)-1 {
		v, u = v/1024, u+1
	}
	if u == 0 {
		return fmt.Sprintf("%d B", n)
	}
	return fmt.Sprintf("%.1f %s", v, units[u])
}
