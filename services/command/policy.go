package command

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/fields"
	"github.com/meander-rl/meander/pkg/models/hub"
	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/present"
)

// pusher is a command that gives a lane other weights: push or rollback.
type pusher struct {
	*app
	client.Push
	Wait time.Duration `key:"wait" help:"how long to wait for the answers of running samplers; 0: do not wait"`
}

// policyCommand makes the command 'meander policy' with its subcommands.
func policyCommand(a *app) *cobra.Command {
	c := &cobra.Command{
		Use:   "policy",
		Short: "change the weights that samplers use: push, list, roll back",
		Long: `policy changes the weights of samplers while they work. A version is the checkpoint of the lane plus
an adapter (a LoRA in PEFT's form), or other weights. Version numbers only go up. Samplers fetch a new
version, check it, load it beside the old one, and change between two steps: nothing stops and no
sample is lost. A version that cannot be used is refused, by the command if it can know, else by each
sampler. Samplers then keep the version before.`,
		Example: `  meander policy push ./adapter
  meander policy ls
  meander policy rollback 3
  meander policy rm --tenant alice`,
	}
	c.AddCommand(policyPushCommand(a), policyListCommand(a), policyShowCommand(a), policyRollbackCommand(a),
		policyCompareCommand(a), policyRemoveCommand(a))
	return c
}

// addFlags adds the flags of push and rollback to f, and more.
func (k *pusher) addFlags(f *pflag.FlagSet, more ...string) {
	k.Rule, k.Scale, k.Wait = schemas.SwapFinish, 1, 30*time.Second
	always := []string{"lane", "tenant", "rule", "version", "by", "note", "wait"}
	fields.Bind("", k).Register(f, append(always, more...)...)
}

// policyPushCommand makes the command 'meander policy push'.
func policyPushCommand(a *app) *cobra.Command {
	k, full := &pusher{app: a}, false
	c := &cobra.Command{
		Use:   "push ADAPTER|WEIGHTS",
		Short: "give the samplers of a lane another adapter, or other weights",
		Long: `push stores a LoRA (a folder or a safetensors file, with the names of PEFT, diffusers, kohya, musubi-tuner
or LyCORIS) as the next version of the lane. It first checks that the file can be read, that its numbers
are finite, and that the model has the weights that it changes, in the same shapes. DoRA, LoHa, LoKr, and
adapters of text encoders are refused by name.

With --full it pushes the weights of a whole transformer: a file, an index of shards, or the folder of
either, also of a variant such as fp16. They must be finite and have all tensors of the checkpoint, in the
same shapes. Samplers need memory for both versions while samples end on the old one.

With --weights-dir too, weights of any size go by path: nothing of them is stored in the server. DIR is a
folder that samplers were given as well (their --weights-dir), maybe as another path. Files that lie in
it stay where they are: leave them unchanged as long as a sampler or verify may need them. Others are
copied to a folder of meander's in it, and freed by 'meander gc --weights-dir DIR' or 'meander up'.

push then waits until every running sampler uses the version or has refused it. If no sampler runs,
the next one starts with it. Weights that the lane already has are not pushed again.

Exit status: 0 every sampler uses it, 1 one refused it or did not answer in time, 2 it was not
pushed.`,
		Example: `  meander policy push ./adapter
  meander policy push ORG/NAME@REVISION    # an adapter of the Hugging Face Hub
  meander policy push ./adapter --lane signs --rule switch --note "update 12"
  meander policy push --full ./checkpoint-40/transformer
  meander policy push --full --weights-dir /shared /shared/checkpoint-40/transformer`,
		RunE: a.withBus(func(c *cobra.Command, conn *connection, given []string) error {
			if full {
				return k.pushFull(c, conn, given[0])
			}
			if k.WeightsDir != "" {
				return usage(errors.New("--weights-dir: given for an adapter; adapters are stored in the server: " +
					"leave it out, " + "or push a whole transformer with --full"))
			}
			if err := a.fetch(c.Context(), "", given[0], hub.Adapter); err != nil {
				return err
			}
			adapter, err := lora.Open(given[0])
			if err != nil {
				return usage(fmt.Errorf("%w; to push the weights of a whole transformer add --full", err))
			}
			if note := adapter.Note(); note != "" {
				fmt.Fprintln(c.ErrOrStderr(), note)
			}
			return k.push(c, conn, func(ctx context.Context, peer *client.Client) (*schemas.Policy, error) {
				return peer.PushPolicy(ctx, adapter, k.Push)
			})
		}),
	}
	k.addFlags(c.Flags(), "weights_dir", "scale", "base")
	c.Flags().BoolVar(&full, "full", false, "push the weights of a whole transformer, not an adapter")
	c.MarkFlagsMutuallyExclusive("full", "scale")
	return c
}

// pushFull pushes the weights of a whole transformer, for --full; name is their file or folder.
func (k *pusher) pushFull(c *cobra.Command, conn *connection, name string) error {
	weights, err := lora.OpenFull(name)
	if err != nil {
		return usage(err)
	}
	err = k.push(c, conn, func(ctx context.Context, peer *client.Client) (*schemas.Policy, error) {
		return peer.PushWeights(ctx, weights, k.Push)
	})
	return errors.Join(err, weights.Close())
}

// policyRollbackCommand makes the command 'meander policy rollback'.
func policyRollbackCommand(a *app) *cobra.Command {
	k := &pusher{app: a}
	c := &cobra.Command{
		Use:   "rollback VERSION",
		Short: "use the weights of an earlier version again",
		Long: `rollback makes the weights of an earlier version the next version of the lane. Version numbers only go
up, so samples that were made in between keep their version.`,
		Example: `  meander policy ls
  meander policy rollback 3 --note "4 reads worse"`,
		RunE: a.withBus(func(c *cobra.Command, conn *connection, given []string) error {
			version, err := versionOf(given[0])
			if err != nil {
				return err
			}
			return k.push(c, conn, func(ctx context.Context, peer *client.Client) (*schemas.Policy, error) {
				return peer.RollbackPolicy(ctx, version, k.Push)
			})
		}),
	}
	k.addFlags(c.Flags())
	return c
}

func versionOf(text string) (int64, error) {
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 0 {
		return 0, usage(fmt.Errorf("VERSION: %q; must be a number that 'meander policy ls' shows", text))
	}
	return n, nil
}

// push stores a new version with store, waits for the samplers' answers, and prints them. A refused push is a usage
// error; a version that some sampler refused or did not answer gives exit status 1.
func (k *pusher) push(
	c *cobra.Command, conn *connection, store func(context.Context, *client.Client) (*schemas.Policy, error),
) error {
	ctx, out, peer := c.Context(), c.OutOrStdout(), client.New(conn.Bus)
	k.By = cmp.Or(k.By, currentUser())
	before := int64(0)
	if newest, err := peer.NewestPolicy(ctx, k.Lane.Of(k.Tenant)); err == nil {
		before = newest.PolicyVersion
	} else if k.Tenant == "" || !errors.Is(err, client.ErrNotFound) { // else the push begins the tenant
		return settingError(err)
	}
	began := time.Now()
	p, err := store(ctx, peer)
	if _, refused := errors.AsType[*client.RefusedError](err); refused || errors.Is(err, client.ErrNotFound) {
		return usage(err)
	}
	if err != nil {
		return withAdvice(ctx, conn.Bus, err)
	}
	news := p.PolicyVersion != before
	switch {
	case k.json:
	case !news:
		fmt.Fprintf(out, "lane %s already has these weights, as version %d\n", p.Lineage(), p.PolicyVersion)
	default:
		fmt.Fprintf(out, "lane %s: version %d after %d, weights %.12s\n", p.Lineage(), p.PolicyVersion, before,
			p.WeightsDigest)
	}
	var replicas []client.Replica
	var late error
	if k.Wait > 0 {
		waiting, stop := context.WithTimeout(ctx, k.Wait)
		replicas, late = peer.AwaitPolicy(waiting, p)
		stop()
	}
	refused := slices.ContainsFunc(replicas, func(r client.Replica) bool {
		return r.Answer != nil && r.Answer.State == schemas.AppliedRefused
	})
	if k.json {
		if err := encode(out, policyJSON(p, replicas)); err != nil {
			return err
		}
	} else if refused || news && k.Wait > 0 && late == nil {
		printAnswers(out, p, replicas, time.Since(began))
	}
	if refused {
		return &exitError{status: exitFailed}
	}
	if late != nil && ctx.Err() == nil {
		return fmt.Errorf("version %d is stored, but not every sampler has answered in %v; see 'meander policy ls'",
			p.PolicyVersion, k.Wait)
	}
	return late
}

// policyJSON returns a policy with the samplers of its lane, for --json.
func policyJSON(p *schemas.Policy, replicas []client.Replica) any {
	line := schemas.JSON(p)
	if fields, ok := line.(map[string]any); ok {
		list := []any{}
		for _, r := range replicas {
			one := map[string]any{
				"instance": r.Instance, "policy_version": r.PolicyVersion,
				"weights_digest": r.WeightsDigest, "loading": r.Loading,
			}
			if r.Answer != nil {
				one["answer"] = schemas.JSON(r.Answer)
			}
			list = append(list, one)
		}
		fields["replicas"] = list
	}
	return line
}

// printAnswers says how many samplers use a pushed version, and which refused it.
func printAnswers(out io.Writer, p *schemas.Policy, replicas []client.Replica, took time.Duration) {
	if len(replicas) == 0 {
		fmt.Fprintln(out, "no sampler runs; the next one starts on it")
		return
	}
	applied := 0
	for _, r := range replicas {
		switch {
		case r.Answer != nil && r.Answer.State == schemas.AppliedRefused:
			fmt.Fprintf(out, "  %s %s and goes on with version %d: %s\n", r.Instance,
				present.Paint(out, present.Red, "refused it"), r.Answer.Serving, r.Answer.Error)
		case r.Answer != nil || r.PolicyVersion != nil && *r.PolicyVersion >= p.PolicyVersion:
			applied++
		}
	}
	fmt.Fprintf(out, "in use by %d of %s after %d ms\n", applied, present.Count(len(replicas), "sampler"),
		took.Milliseconds())
}

// policyRemoveCommand makes the command 'meander policy rm'.
func policyRemoveCommand(a *app) *cobra.Command {
	var of schemas.Lineage
	c := &cobra.Command{
		Use:   "rm",
		Short: "remove a tenant of a lane, with all its versions, for ever",
		Long: `rm removes a tenant of a lane: its versions, what samplers answered to them, and files of weights that
nothing else names and that are older than two minutes. It is refused while a trainer has the tenant, and while runs are
stored whose samples or updates are its: they could be recomputed no more. A push begins the name again, at version 0.`,
		Example: "  meander policy rm --tenant alice",
		RunE: a.withBus(func(c *cobra.Command, conn *connection, _ []string) error {
			n, err := client.New(conn.Bus).RemoveTenant(c.Context(), of)
			if _, refused := errors.AsType[*client.RefusedError](err); refused {
				return usage(err)
			}
			if err != nil {
				return settingError(err)
			}
			fmt.Fprintf(c.OutOrStdout(), "tenant %s: %s removed\n", of.Tenant, present.Count(n, "version"))
			return sweepBlobs(c, conn)
		}),
	}
	c.Flags().StringVar((*string)(&of.Lane), "lane", "", onlyLane)
	c.Flags().StringVar((*string)(&of.Tenant), "tenant", "", "the one to remove")
	return c
}

// onlyLane is the help of --lane where it may be left out.
const onlyLane = "lane; default the only lane, or the only one that samplers serve now"

// policyListCommand makes the command 'meander policy ls'.
func policyListCommand(a *app) *cobra.Command {
	var of schemas.Lineage
	c := &cobra.Command{
		Use:   "ls",
		Short: "list the versions of each tenant of each lane, and the version that each sampler uses",
		Example: `  meander policy ls
  meander policy ls --lane signs --json`,
		RunE: a.withBus(func(c *cobra.Command, conn *connection, _ []string) error {
			all, err := conn.Policies(c.Context())
			if err != nil {
				return err
			}
			all = slices.DeleteFunc(all, func(p *schemas.Policy) bool {
				return of.Lane != "" && of.Lane != p.Lane || of.Tenant != "" && of.Tenant != p.Tenant
			})
			switch len(all) {
			case 0:
				return a.listPolicies(c, conn, of, "")
			case 1:
				return a.listPolicies(c, conn, all[0].Lineage(), "")
			}
			for i, p := range all {
				title := present.When(i > 0, "\n") + fmt.Sprintf("lane %s\n", p.Lineage())
				if err := a.listPolicies(c, conn, p.Lineage(), title); err != nil {
					return err
				}
			}
			return nil
		}),
	}
	c.Flags().StringVar((*string)(&of.Lane), "lane", "", "lane; default all lanes")
	c.Flags().StringVar((*string)(&of.Tenant), "tenant", "", "tenant; default all tenants")
	return c
}

// listPolicies prints the versions of a tenant of a lane under a title, and the one that each sampler uses. An unknown
// lane is a usage error.
func (a *app) listPolicies(c *cobra.Command, conn *connection, of schemas.Lineage, title string) error {
	peer, out := client.New(conn.Bus), c.OutOrStdout()
	current, err := peer.Policy(c.Context(), of)
	if err != nil {
		return settingError(err)
	}
	history, err := peer.PolicyHistory(c.Context(), current.Lineage())
	if err != nil {
		return err
	}
	newest, err := peer.NewestPolicy(c.Context(), current.Lineage())
	if err != nil {
		return err
	}
	replicas, err := peer.Replicas(c.Context(), newest)
	if err != nil {
		return err
	}
	refused, err := peer.PolicyRefusals(c.Context(), current.Lineage())
	if err != nil {
		return err
	}
	if !a.json {
		fmt.Fprint(out, title)
		printPolicies(out, current, newest, history, refused, replicas)
		return nil
	}
	for _, p := range history {
		var users []client.Replica
		if p.PolicyVersion == newest.PolicyVersion {
			users = replicas
		}
		line := policyJSON(p, users)
		if fields, ok := line.(map[string]any); ok {
			fields["current"] = p.PolicyVersion == current.PolicyVersion
			if why := refused[p.PolicyVersion]; why != "" {
				fields["refused"] = why
			}
		}
		if err := encode(out, line); err != nil {
			return err
		}
	}
	return nil
}

// printPolicies prints the table of a lane's versions, the current one with a mark, and the state of each sampler.
// refused has the reasons by version.
func printPolicies(out io.Writer, current, newest *schemas.Policy, history []*schemas.Policy,
	refused map[int64]string, replicas []client.Replica,
) {
	serving := map[int64]int{}
	for _, r := range replicas {
		if r.PolicyVersion != nil {
			serving[*r.PolicyVersion]++
		}
	}
	t := present.New("VERSION", "WEIGHTS", "WHAT", "SAMPLERS", "WHEN", "BY", "NOTE")
	for _, p := range history {
		mark := ""
		if p.PolicyVersion == current.PolicyVersion {
			mark = "*"
		}
		note := p.Note
		if refused[p.PolicyVersion] != "" {
			note = strings.TrimSuffix("refused; "+note, "; ")
		}
		when := time.Unix(0, p.Announced).UTC().Format(time.RFC3339)
		t.Row(fmt.Sprintf("%d%s", p.PolicyVersion, mark), fmt.Sprintf("%.12s", p.WeightsDigest), weightsLine(p),
			serving[p.PolicyVersion], when, present.OrDash(p.By), note)
	}
	t.Print(out)
	fmt.Fprintln(out)
	t = present.New("SAMPLER", "USES", "STATE")
	for _, r := range replicas {
		uses := "-"
		if r.PolicyVersion != nil {
			uses = strconv.FormatInt(*r.PolicyVersion, 10)
		}
		t.Row(r.Instance, uses, replicaLine(newest, r))
	}
	t.Print(out)
	if len(replicas) == 0 {
		fmt.Fprintln(out, "none runs; the next one starts on version", current.PolicyVersion)
	}
}

// weightsLine says in a few words what the weights of a policy are.
func weightsLine(p *schemas.Policy) string {
	text := "checkpoint"
	if len(p.Weights) > 0 {
		text = "weights " + p.Weights[0].Digest[:8]
	}
	if a := p.Adapter; a != nil {
		text = "adapter " + a.File.Digest[:8] + present.When(a.Scale != 1, " x %g", a.Scale)
	}
	if p.Rollback != nil {
		text += fmt.Sprintf(", that of %d", *p.Rollback)
	}
	return text
}

// replicaLine says what a sampler does about the lane's newest version.
func replicaLine(newest *schemas.Policy, r client.Replica) string {
	switch {
	case r.Answer != nil && r.Answer.State == schemas.AppliedRefused:
		return fmt.Sprintf("refused version %d: %s", newest.PolicyVersion, present.FirstLine(r.Answer.Error))
	case r.Draining:
		return "stops"
	case r.Loading != nil:
		return fmt.Sprintf("loads version %d", *r.Loading)
	case r.PolicyVersion != nil && *r.PolicyVersion == newest.PolicyVersion:
		return "current"
	}
	return fmt.Sprintf("behind version %d", newest.PolicyVersion)
}

// policyShowCommand makes the command 'meander policy show'.
func policyShowCommand(a *app) *cobra.Command {
	var of schemas.Lineage
	c := &cobra.Command{
		Use:   "show [VERSION]",
		Short: "show one version: its weights, where they come from, the answers of samplers",
		Example: `  meander policy show
  meander policy show 3 --json`,
		RunE: a.withBus(func(c *cobra.Command, conn *connection, given []string) error {
			p, err := client.New(conn.Bus).Policy(c.Context(), of)
			if err != nil {
				return settingError(err)
			}
			if len(given) > 0 {
				version, err := versionOf(given[0])
				if err != nil {
					return err
				}
				history, err := conn.PolicyHistory(c.Context(), p.Lineage())
				if err != nil {
					return err
				}
				i := slices.IndexFunc(history, func(p *schemas.Policy) bool { return p.PolicyVersion == version })
				if i < 0 {
					return usage(fmt.Errorf("VERSION: %d; must be one of lane %s: %s", version, p.Lineage(),
						bus.PolicyVersions(history)))
				}
				p = history[i]
			}
			answers, err := conn.Applied(c.Context(), p.Lineage())
			if err != nil {
				return err
			}
			return a.printPolicy(c.OutOrStdout(), p, answers)
		}),
	}
	c.Flags().StringVar((*string)(&of.Lane), "lane", "", onlyLane)
	c.Flags().StringVar((*string)(&of.Tenant), "tenant", "", "whose weights; default main")
	return c
}

// printPolicy prints a version and the samplers' answers to it.
func (a *app) printPolicy(out io.Writer, p *schemas.Policy, answers []*schemas.Applied) error {
	if a.json {
		return encode(out, schemas.JSON(p))
	}
	t := &present.Table{}
	line := func(name, format string, args ...any) { t.Row(name, fmt.Sprintf(format, args...)) }
	line("lane", "%s", p.Lane)
	if p.Tenant != schemas.TenantMain {
		line("tenant", "%s", p.Tenant)
	}
	line("version", "%d", p.PolicyVersion)
	line("model", "%s (%s)", p.Model, p.Family)
	if p.Source != "" {
		line("from", "%s, of the Hugging Face Hub", p.Source)
	}
	line("weights", "%s", p.WeightsDigest)
	line("base", "%s", present.OrDash(p.BaseDigest))
	line("made of", "%s", weightsLine(p))
	if p.Adapter != nil {
		line("adapter", "%s, %s, scale %g", p.Adapter.File.Digest, present.Size(p.Adapter.File.Size), p.Adapter.Scale)
		if p.Adapter.Source != "" {
			line("adapter from", "%s, of the Hugging Face Hub", p.Adapter.Source)
		}
	}
	for _, w := range p.Weights {
		line("weights of", "%s, %s%s", w.Digest, present.Size(w.Size),
			present.When(w.Path != "", ", by path: %s", w.Path))
	}
	if p.Parent != nil {
		line("follows", "%d", *p.Parent)
	}
	line("rule", "%s", cmp.Or(p.Rule, schemas.SwapFinish))
	line("by", "%s", present.OrDash(p.By))
	line("note", "%s", present.OrDash(p.Note))
	line("published", "%s", time.Unix(0, p.Announced).UTC().Format(time.RFC3339Nano))
	for _, r := range answers {
		if r.PolicyVersion != p.PolicyVersion {
			continue
		}
		text := fmt.Sprintf("%s in %d ms, on %s", r.State, r.LoadNS/1e6, present.OrDash(r.Backend))
		if r.Canary != nil && r.State == schemas.AppliedApplied {
			text += fmt.Sprintf(", canary %.12s of norm %.6g", r.Canary.Digest, r.Canary.Norm)
		}
		line(r.Instance, "%s", text+present.When(r.Error != "", ": %s", r.Error))
	}
	t.Print(out)
	return nil
}
