package command

import (
	"encoding/json"
	"io"

	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/schemas"
)

// decodeCommand makes the command 'meander decode'.
func decodeCommand(*app) *cobra.Command {
	return &cobra.Command{
		Use: "decode", Short: "print an event from standard input as JSON: for nats sub --translate",
		Long: `decode reads one event, as it is stored, and prints it as one line of JSON, as watch --json does: byte
strings as their length and digest. With it the nats command shows what streams hold.`,
		Example: `  nats sub --translate 'meander decode' 'mdr.v1.advantage.demo.*'
  nats stream view MDR_TRAJECTORIES --translate 'meander decode'`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			data, err := io.ReadAll(io.LimitReader(c.InOrStdin(), schemas.MaxEventBytes+1))
			if err != nil {
				return err
			}
			if err := schemas.Precheck(data); err != nil && !json.Valid(data) {
				return err
			}
			return encode(c.OutOrStdout(), schemas.JSONOfBytes(data))
		},
	}
}
