package command

import (
	"fmt"
	"os/user"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/present"
)

// runsTagCommand makes the command 'meander runs tag'.
func runsTagCommand(a *app) *cobra.Command {
	remove := false
	c := &cobra.Command{
		Use: "tag RUN TAG ...", Short: "give a run tags, by which the list and the page find it",
		Example: "  meander runs tag night baseline \"cfg 4\"\n  meander runs tag night baseline --remove",
		RunE: a.withBus(func(c *cobra.Command, conn *connection, given []string) error {
			return a.editNotes(c, conn, given[0], func(n *bus.Notes) {
				n.Tags = slices.DeleteFunc(n.Tags, func(tag string) bool { return slices.Contains(given[1:], tag) })
				if !remove {
					n.Tags = append(n.Tags, given[1:]...)
				}
			})
		}),
	}
	c.Flags().BoolVar(&remove, "remove", false, "take the tags away")
	return c
}

// runsNoteCommand makes the command 'meander runs note'.
func runsNoteCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "note RUN [TEXT]", Short: "write the note of a run in place of the one before; without TEXT, remove it",
		Example: "  meander runs note night 'diverged at step 300; see the KL'",
		RunE: a.withBus(func(c *cobra.Command, conn *connection, given []string) error {
			return a.editNotes(c, conn, given[0], func(n *bus.Notes) {
				n.Note = strings.Join(given[1:], "")
			})
		}),
	}
}

// editNotes changes the notes of a stored run, and prints them.
func (a *app) editNotes(c *cobra.Command, conn *connection, run string, edit func(*bus.Notes)) error {
	if _, err := storedRun(c.Context(), conn.Bus, run); err != nil {
		return err
	}
	by := ""
	if me, err := user.Current(); err == nil { // else no one is named
		by = me.Username
	}
	var invalid error
	n, err := conn.EditNotes(c.Context(), schemas.Run(run), by, func(n *bus.Notes) {
		edit(n)
		invalid = n.Validate()
	})
	if invalid != nil {
		return usage(invalid)
	}
	if err != nil {
		return err
	}
	if a.json {
		return encode(c.OutOrStdout(), n)
	}
	present.Linef(c.OutOrStdout(), "run %s: tags %s", run, present.OrDash(strings.Join(n.Tags, ", ")))
	if n.Note != "" {
		fmt.Fprintln(c.OutOrStdout(), n.Note)
	}
	return nil
}
