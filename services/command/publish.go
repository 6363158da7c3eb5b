package command

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/estimate"
	"github.com/meander-rl/meander/services/internal/present"
)

// publishCommand returns the command 'meander publish'. It reads the prompts, estimates what they need, and refuses
// them if none would be accepted or if they cannot fit into the streams. Then it prints the estimate on stderr, writes
// the model's name into prompts without one, publishes them one by one and prints intake's answers. --dry-run ends
// after the estimate and prints it on stdout.
func publishCommand(a *app) *cobra.Command {
	var p promptFlags
	var run schemas.Run
	var wait time.Duration
	c := &cobra.Command{
		Use:   "publish [PROMPT ...]",
		Args:  quotedPrompts,
		Short: "send prompts to a running pipeline and print intake's answers",
		Long: `publish sends prompts to a pipeline that runs elsewhere (meander up, or the four services). It waits
for intake's answer to each prompt: accepted, or refused with the reason. The pipeline then makes the
samples in the background; 'meander watch' shows them.`,
		Example: `  meander publish --run demo 'a red sign that says "OPEN"' 'a blue sign that says "4071"'
  meander publish --run demo --prompts prompts.jsonl --group-size 16 --sde-steps 2,3
  meander publish --run demo --prompts prompts.jsonl --batch-size 32 --batches 100 --shuffle 7
  meander publish --nats nats://10.0.0.5:4222 --run demo 'a red sign that says "OPEN"'`,
		RunE: func(c *cobra.Command, texts []string) error {
			if err := checkWait(wait); err != nil {
				return err
			}
			if err := a.fetchPrompts(c.Context(), &p.datasetFlags); err != nil {
				return err
			}
			if p.DryRun {
				return a.dryRun(c, run, &p, nil, texts)
			}
			prompts, err := p.load(texts, c.InOrStdin(), false)
			if err != nil {
				return err
			}
			return a.withConnection(a.connect, func(c *cobra.Command, conn *connection, _ []string) error {
				plan, err := a.estimate(c.Context(), &p.datasetFlags, conn, nil, prompts)
				if err == nil {
					err = plan.refusalError(p.names)
				}
				if err == nil {
					err = plan.printAndCheck(c.Context(), conn, run, p.Overfill, c.ErrOrStderr())
				}
				if err != nil {
					return err
				}
				a.nameModel(prompts, plan.facts)
				return a.publishAll(c, conn, run, prompts, wait, plan.Warnings)
			})(c, texts)
		},
	}
	nameFlag(c.Flags(), &run, "run", "default", "run of the prompts")
	c.Flags().DurationVar(&wait, "wait", 10*time.Second, "how long to wait for intake's answer to each prompt")
	p.addFlags(c.Flags())
	return c
}

// checkWait refuses a time for answers in which none can come.
func checkWait(wait time.Duration) error {
	if wait <= 0 {
		return usage(fmt.Errorf("--wait: %v; must be above 0", wait))
	}
	return nil
}

// publishAll publishes the prompts one by one, and prints intake's answer to each, with warnings but those that are
// known. A refused or held prompt gives exit status 1. Other errors end it; what is published stays.
func (a *app) publishAll(
	c *cobra.Command, conn *connection, run schemas.Run, prompts []prompt, wait time.Duration, known []string,
) error {
	refused := 0
	for _, prompt := range prompts {
		receipt, err := publishOne(c.Context(), conn, run, prompt, wait)
		if err != nil {
			return withAdvice(c.Context(), conn.Bus, err)
		}
		if a.json {
			if err := encode(c.OutOrStdout(), schemas.JSON(receipt)); err != nil {
				return err
			}
		} else if receipt.Accepted {
			steps := fmt.Sprintf(" x %d", receipt.Steps())
			if receipt.TotalSteps != nil {
				steps = fmt.Sprintf(", %d", *receipt.TotalSteps)
			}
			present.Linef(c.OutOrStdout(), "accepted  %s  %s%s steps  %q", receipt.UID,
				present.Count(receipt.Samples, "sample"), steps, prompt.text)
		} else {
			present.Linef(c.OutOrStdout(), "%-8s  %q  %s", notAccepted(receipt), prompt.text,
				receipt.Error+receipt.Waiting)
		}
		for _, w := range receipt.Warnings {
			if !slices.Contains(known, w) {
				present.Linef(c.ErrOrStderr(), "warning: %s: %s", receipt.UID, w)
			}
		}
		if !receipt.Accepted {
			refused++
		}
	}
	if refused > 0 {
		return &exitError{status: exitFailed}
	}
	return nil
}

// notAccepted says in one word what happened to a prompt that was not accepted: held, stored or refused.
func notAccepted(r *schemas.Receipt) string {
	switch {
	case r.Waiting != "":
		return "held"
	case r.Code == "stored":
		return "stored"
	}
	return "refused"
}

// publishOne stores one prompt and waits for intake's receipt. A refusal is in the receipt. Without an answer in time
// the receipt says that the prompt is stored. An error is of the server.
func publishOne(
	ctx context.Context, conn *connection, run schemas.Run, p prompt, wait time.Duration,
) (*schemas.Receipt, error) {
	if err := p.moveToObjectStore(ctx, conn.Bus); err != nil {
		return nil, err
	}
	data, err := p.encode()
	if err != nil {
		return nil, err
	}
	answer, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	r, err := client.New(conn.Bus).PublishEncoded(answer, run, data)
	var refused *client.RefusedError
	var held *client.HeldError
	switch {
	case errors.As(err, &refused), errors.As(err, &held) && ctx.Err() == nil:
		return r, nil
	case errors.Is(err, client.ErrNoAnswer) && ctx.Err() == nil:
		return &schemas.Receipt{
			Run: run, UID: p.uid, Code: "stored",
			Error: fmt.Sprintf("no intake answered in %v; the prompt is stored, and the next intake that runs "+
				"answers it", wait),
		}, nil
	case err != nil:
		// Intake makes the uids that are not given.
		name := cmp.Or(string(p.uid), strconv.Quote(present.Cut(p.text, 60)))
		return nil, fmt.Errorf("prompt %s: %w", name, err)
	}
	return r, nil
}

// mostAsked is how many prompts of a dry run intake is asked about.
const mostAsked = 8

// askIntake asks the intake of the pipeline what would become of the first prompts, and adds what it says to the
// warnings: it alone knows which uids are taken, and what waits. Without an answer nothing is added.
func (p *estimated) askIntake(ctx context.Context, conn *connection, run schemas.Run, prompts []prompt) error {
	ctx, stop := context.WithTimeout(ctx, 5*time.Second)
	defer stop()
	known := func(text string) bool {
		said := func(r estimate.Refusal) bool { return r.Reason == text }
		return slices.Contains(p.Warnings, text) || slices.ContainsFunc(p.Refusals, said)
	}
	for _, q := range prompts {
		data, err := q.encode()
		if err != nil {
			return err
		}
		if list, _ := q.body["conditions"].([]any); len(data) > conn.MaxInline() || len(list) > 0 {
			continue // what it is made from goes to the object store first
		}
		r, _ := client.New(conn.Bus).TryEncoded(ctx, run, data)
		if r == nil {
			return nil
		}
		if text := r.Error + r.Waiting; text != "" && !known(text) {
			p.Warnings = append(p.Warnings, text)
		}
	}
	return nil
}
