package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/weightsdir"
	"github.com/meander-rl/meander/schemas"
)

// Push says how weights are to be served. Its zero value is the next version of the only lane. Without By it is the
// client who pushes.
type Push struct {
	Lane schemas.Lane `key:"lane" help:"lane; default the only lane, or the only one that samplers serve now"`
	// Tenant has versions of its own on the lane; the first push of one begins with its version 0, the checkpoint.
	Tenant  schemas.Tenant `key:"tenant" form:"token" help:"whose weights of the lane, of those who have their own there, as each of several trainers has; default main. A name that is new begins with the checkpoint"`
	Rule    string         `key:"rule" help:"for samples that have begun: finish (keep the old weights to the end; the default), switch (use the new weights from the next step on) or restart"`
	Version int64          `key:"version" help:"version number, above that of the lane; default the next one"`
	By      string         `key:"by" help:"who pushes; default user@host"`
	Note    string         `key:"note" help:"note; others see it"`
	Scale   float64        `key:"scale" help:"scale of the adapter; 1, the default, is the scale of its training"`
	Base    string         `key:"base" help:"digest of the checkpoint that it was trained on; push refuses another one. See 'meander policy show'"`
	// WeightsDir is a folder that the samplers have too, maybe elsewhere (their --weights-dir). PushWeights names the
	// files by their path in it, and stores nothing of them: those that lie in it stay where they are, others it copies
	// to it, for the janitor to remove. Empty: the weights are stored in the server. Adapters always are.
	WeightsDir string `key:"weights_dir" help:"with --full: push by path, in this folder, which samplers share"`
}

// PushPolicy makes the checkpoint plus an adapter (nil: the checkpoint alone) the next version of a lane, and returns
// the policy; a trainer calls it after an update. It checks the adapter before it stores anything; a bad one is a
// *RefusedError. Weights that the lane already serves are not pushed again: it then returns the current policy.
// An adapter as training begins, which adds nothing yet, is the checkpoint where that is served; later it is refused.
// Samplers change to the policy by themselves; see AwaitPolicy.
func (c *Client) PushPolicy(ctx context.Context, adapter *lora.Adapter, push Push) (*schemas.Policy, error) {
	return c.publishNext(ctx, push, func(current *schemas.Policy) (*schemas.Policy, error) {
		next := *current
		next.Rollback, next.Adapter, next.Weights, next.WeightsDigest = nil, nil, nil, current.BaseDigest
		if err := push.checkBase(current); err != nil || adapter == nil {
			return &next, err
		}
		if current.Modules == nil {
			return nil, refusedPolicy("adapter: the model %q of lane %q takes none", current.Model, current.Lane)
		}
		data, err := c.bus.GetBlob(ctx, *current.Modules)
		if err != nil {
			return nil, fmt.Errorf("fetch the table of modules of lane %q: %w", current.Lane, err)
		}
		table, err := lora.ParseTable(data)
		if err != nil {
			return nil, err
		}
		if table.Fresh(adapter) {
			if served, err := c.bus.CurrentPolicy(ctx, current.Lineage()); err != nil || served.IsCheckpoint() {
				return &next, err
			}
		}
		with := lora.Weighted{Adapter: adapter, Weight: cmp.Or(push.Scale, 1)}
		if err := table.Check(with); err != nil {
			return nil, refusedPolicy("%w", err)
		}
		ref, err := c.bus.PutBlob(ctx, adapter.File())
		if err != nil {
			return nil, c.explainStore(ctx, fmt.Errorf("store the adapter: %w", err))
		}
		next.Adapter = &schemas.PolicyAdapter{File: ref, Config: adapter.Config(), Scale: with.Weight}
		next.WeightsDigest = lora.WeightsDigest(current.BaseDigest, with)
		return &next, nil
	})
}

// PushWeights is PushPolicy for a whole transformer, in place of the checkpoint's. Weights whose names or shapes do
// not fit the checkpoint are a *RefusedError. While samples end on the old weights, samplers need memory for both,
// and for the files until they are loaded.
func (c *Client) PushWeights(ctx context.Context, weights *lora.Full, push Push) (*schemas.Policy, error) {
	return c.publishNext(ctx, push, func(current *schemas.Policy) (*schemas.Policy, error) {
		if err := push.checkBase(current); err != nil {
			return nil, err
		}
		if current.Tensors == nil {
			why := ""
			if by := current.DrawnBy(); by != nil {
				why = ": " + by.NoWhole()
			}
			return nil, refusedPolicy("weights: the model %q of lane %q takes none%s", current.Model, current.Lane, why)
		}
		data, err := c.bus.GetBlob(ctx, *current.Tensors)
		if err != nil {
			return nil, fmt.Errorf("fetch the table of tensors of lane %q: %w", current.Lane, err)
		}
		shapes, err := lora.ParseShapes(data)
		if err != nil {
			return nil, err
		}
		if err := shapes.Check(weights); err != nil {
			return nil, refusedPolicy("weights: %w", err)
		}
		next := *current
		next.Rollback, next.Adapter, next.Weights = nil, nil, nil
		if next.Weights, err = c.storeWeights(ctx, weights, push.WeightsDir); err != nil {
			return nil, err
		}
		var digests []string
		for _, file := range next.Weights {
			digests = append(digests, file.Digest)
		}
		next.WeightsDigest = lora.FullDigest(current.BaseDigest, digests...)
		return &next, nil
	})
}

// storeWeights puts the files of a transformer where samplers find them: into the server, or into the shared folder
// dir.
func (c *Client) storeWeights(
	ctx context.Context, weights *lora.Full, dir string,
) (out []schemas.WeightsFile, err error) {
	if dir != "" {
		return c.placeWeights(ctx, weights, dir)
	}
	for _, file := range weights.Files() {
		ref, err := c.bus.PutBlob(ctx, file)
		if err != nil {
			return nil, c.explainStore(ctx, fmt.Errorf("store the weights: %w", err))
		}
		out = append(out, schemas.FileOfBlob(ref))
	}
	return out, nil
}

// explainStore adds to the error of an object store that is full how much of it weights take, and what to do.
func (c *Client) explainStore(ctx context.Context, err error) error {
	if !errors.Is(err, bus.ErrStreamFull) {
		return err
	}
	policies, listErr := c.bus.Policies(ctx)
	versions, size, seen := 0, int64(0), map[string]bool{}
	for _, of := range policies {
		history, historyErr := c.bus.PolicyHistory(ctx, of.Lineage())
		listErr = errors.Join(listErr, historyErr)
		for _, p := range history {
			before := size
			for _, f := range p.Files() {
				if f.Path == "" && !seen[f.Digest] && c.bus.HasBlob(ctx, f.Blob()) == nil {
					seen[f.Digest], size = true, size+f.Size
				}
			}
			if size > before {
				versions++
			}
		}
	}
	if listErr != nil {
		return err
	}
	return fmt.Errorf("%w; of them weights of %d versions take %d bytes: 'meander gc --blobs' frees those that no "+
		"stored sample needs, and whole transformers take no space there if they are pushed by path (--weights-dir)",
		err, versions, size)
}

// placeWeights puts the files of a transformer into the shared folder, those that are not in it.
func (c *Client) placeWeights(
	ctx context.Context, weights *lora.Full, path string,
) (out []schemas.WeightsFile, err error) {
	store, err := c.bus.StoreID(ctx)
	if err != nil {
		return nil, err
	}
	dir, err := weightsdir.Open(path)
	if err != nil {
		return nil, refusedPolicy("weights_dir: %w", err)
	}
	defer func() { err = errors.Join(err, dir.Close()) }()
	files := make([]weightsdir.Source, len(weights.Files()))
	for i, file := range weights.Files() {
		if files[i].Bytes = file; weights.Paths() != nil {
			files[i].Path = weights.Paths()[i]
		}
	}
	return dir.Place(ctx, store, files...)
}

func (p Push) checkBase(current *schemas.Policy) error {
	if p.Base != "" && p.Base != current.BaseDigest {
		return refusedPolicy("base: %.16s; must be of the checkpoint that lane %q serves, %.16s", p.Base, current.Lane,
			current.BaseDigest)
	}
	return nil
}

// RollbackPolicy makes the weights of an earlier version the lane's next version. ErrNotFound: the lane has no such
// version. *RefusedError: every sampler refused that version, it is of another checkpoint, or its files are no longer
// stored.
func (c *Client) RollbackPolicy(ctx context.Context, version int64, push Push) (*schemas.Policy, error) {
	return c.publishNext(ctx, push, func(current *schemas.Policy) (*schemas.Policy, error) {
		p, unfit, err := c.bus.EarlierPolicy(ctx, current, version)
		if err == nil && unfit != nil {
			err = refusedPolicy("version: %d; %w", version, unfit)
		}
		if err != nil {
			return nil, err
		}
		next := *current
		next.Adapter, next.Weights, next.WeightsDigest, next.Rollback = p.Adapter, p.Weights, p.WeightsDigest, &version
		return &next, nil
	})
}

// RemoveTenant removes a tenant of a lane with all its versions, and returns how many there were; an empty lane is that
// of Policy. Another may be begun under the name, from version 0 on. *RefusedError: it is main, a trainer has it, or
// stored runs need its versions.
func (c *Client) RemoveTenant(ctx context.Context, of schemas.Lineage) (versions int, err error) {
	if of.Tenant == "" || of.Tenant == schemas.TenantMain {
		return 0, refusedPolicy("tenant: %q; must be another than main, which a lane always has", of.Tenant)
	}
	p, err := c.NewestPolicy(ctx, of)
	if err != nil {
		return 0, err
	}
	of = p.Lineage()
	if trainer, err := c.bus.Trainer(ctx, of); err != nil || trainer != "" {
		return 0, cmp.Or(err, refusedPolicy("lane %q: %s trains it; must be one that no trainer has: stop that one "+
			"first, or wait %v after it was killed", of, trainer, schemas.LeaseTTL))
	}
	runs, err := c.bus.TenantRuns(ctx, of)
	if err == nil && len(runs) > 0 {
		names := namesOf(runs[:min(len(runs), 8)], func(r schemas.Run) string { return string(r) })
		err = refusedPolicy("lane %q: %d stored runs need its versions; must be none: remove them first, with "+
			"'meander runs rm %s'", of, len(runs), strings.Join(names, " "))
	}
	if err != nil {
		return 0, err
	}
	return c.bus.RemoveTenant(ctx, of)
}

func refusedPolicy(format string, args ...any) error {
	err := fmt.Errorf(format, args...)
	return &RefusedError{Code: schemas.CodeInvalid, Reason: err.Error(), What: "policy"}
}

// publishNext stores the policy that next makes of the lane's current one; the three methods that change a policy
// share it. It tries again if another client was faster. If the weights are the same and not refused, it stores
// nothing and returns the current policy. A fault of push is a *RefusedError; an error of next is returned.
func (c *Client) publishNext(ctx context.Context, push Push,
	next func(current *schemas.Policy) (*schemas.Policy, error),
) (*schemas.Policy, error) {
	if push.Rule != "" && !slices.Contains(schemas.SwapRules, push.Rule) {
		return nil, refusedPolicy("rule: %q; must be one of %v", push.Rule, schemas.SwapRules)
	}
	for {
		lane, err := c.resolveLane(ctx, push.Lane)
		if err == nil && push.Tenant != "" {
			err = schemas.CheckToken("tenant", push.Tenant)
		}
		if err != nil {
			return nil, err
		}
		of := lane.Of(push.Tenant)
		if err := c.bus.AddTenant(ctx, of); err != nil {
			if _, terminal := errors.AsType[*bus.TerminalError](err); terminal {
				err = refusedPolicy("%w", err)
			}
			return nil, err
		}
		current, err := c.bus.Policy(ctx, of)
		if err != nil {
			return nil, err
		}
		// Asked after the policy: who takes the lease later announces the policy again, which SetPolicy sees.
		trainer, err := c.bus.Trainer(ctx, of)
		if err != nil {
			return nil, err
		}
		if trainer != "" {
			return nil, refusedPolicy("lane %q: %s trains it, and has it to itself; must be a lane that no trainer "+
				"has: stop that one first, wait %v after it was killed, or push for another tenant", of, trainer,
				schemas.LeaseTTL)
		}
		p, err := next(current)
		if err != nil {
			return nil, err
		}
		if p.WeightsDigest == current.WeightsDigest {
			refused, err := c.bus.PolicyRefusals(ctx, of)
			if err != nil || p.IsCheckpoint() || refused[current.PolicyVersion] == "" {
				return current, err
			}
		}
		p.PolicyVersion = cmp.Or(push.Version, current.PolicyVersion+1)
		if p.PolicyVersion <= current.PolicyVersion {
			return nil, refusedPolicy("version: %d; must be above %d, which lane %q serves", p.PolicyVersion,
				current.PolicyVersion, of)
		}
		p.Parent, p.Rule, p.By, p.Note, p.Announced = &current.PolicyVersion, push.Rule, cmp.Or(push.By,
			"client"), push.Note, time.Now().UnixNano()
		if err := p.Validate(); err != nil {
			return nil, refusedPolicy("%w", err)
		}
		if err = c.bus.SetPolicy(ctx, p, current); !errors.Is(err, bus.ErrBehind) {
			return p, err
		}
	}
}

// Policy returns what a lane serves now: its newest version that samplers have not refused, or ErrNotFound. An empty
// lane means the only lane, or the only one that samplers serve now, an empty tenant main.
func (c *Client) Policy(ctx context.Context, of schemas.Lineage) (*schemas.Policy, error) {
	newest, err := c.NewestPolicy(ctx, of)
	if err != nil {
		return nil, err
	}
	return c.bus.CurrentPolicy(ctx, newest.Lineage())
}

// NewestPolicy returns the policy that was pushed last to a lane, whether samplers use it, have refused it or have
// not answered yet.
func (c *Client) NewestPolicy(ctx context.Context, of schemas.Lineage) (*schemas.Policy, error) {
	lane, err := c.resolveLane(ctx, of.Lane)
	if err == nil && of.Tenant != "" {
		err = schemas.CheckToken("tenant", of.Tenant)
	}
	if err != nil {
		return nil, err
	}
	p, err := c.bus.Policy(ctx, lane.Of(of.Tenant))
	if errors.Is(err, ErrNotFound) {
		all, _ := c.bus.Policies(ctx)
		all = slices.DeleteFunc(all, func(p *schemas.Policy) bool { return p.Lane != lane })
		names := namesOf(all, func(p *schemas.Policy) string { return string(p.Tenant) })
		err = fmt.Errorf("tenant: %q; must be one of %s, or be begun by a push: %w", of.Tenant,
			strings.Join(names, ", "), err)
	}
	return p, err
}

// PolicyRefusals returns the versions of a tenant of a lane that samplers refused and none uses, with the reason.
func (c *Client) PolicyRefusals(ctx context.Context, of schemas.Lineage) (map[int64]string, error) {
	return c.bus.PolicyRefusals(ctx, of)
}

// resolveLane returns the lane that a policy is for: the given one if it exists, else the only lane, or the only one
// that samplers serve now. Anything else is an error that lists the lanes.
func (c *Client) resolveLane(ctx context.Context, lane schemas.Lane) (schemas.Lane, error) {
	if lane != "" {
		if err := schemas.CheckToken("lane", lane); err != nil {
			return "", err
		}
		_, err := c.bus.Policy(ctx, lane.Of(schemas.TenantMain))
		if all, _ := c.lanes(ctx); errors.Is(err, ErrNotFound) && len(all) > 0 {
			err = fmt.Errorf("lane: %q; must be one of %s: %w", lane, strings.Join(namesOf(all, laneOf), ", "), err)
		}
		return lane, err
	}
	all, err := c.lanes(ctx)
	if err != nil {
		return "", err
	}
	switch len(all) {
	case 0:
		return "", fmt.Errorf("policy: %w: no sampler has announced a model", ErrNotFound)
	case 1:
		return all[0].Lane, nil
	}
	present, err := c.bus.Present(ctx)
	if err != nil {
		return "", err
	}
	var served []schemas.Lane
	for _, p := range all {
		if slices.ContainsFunc(present, func(s *schemas.Presence) bool {
			return s.Service == schemas.ServiceSampler && s.Lane == p.Lane
		}) {
			served = append(served, p.Lane)
		}
	}
	if len(served) != 1 {
		return "", fmt.Errorf("lane: not given; must be one of %s, of which samplers serve %d now",
			strings.Join(namesOf(all, laneOf), ", "), len(served))
	}
	return served[0], nil
}

// lanes returns the current policies of main.
func (c *Client) lanes(ctx context.Context) ([]*schemas.Policy, error) {
	all, err := c.bus.Policies(ctx)
	return slices.DeleteFunc(all, func(p *schemas.Policy) bool { return p.Tenant != schemas.TenantMain }), err
}

func laneOf(p *schemas.Policy) string { return string(p.Lane) }

func namesOf[T any](all []T, name func(T) string) (names []string) {
	for _, p := range all {
		names = append(names, name(p))
	}
	return names
}

// PolicyHistory returns the policies that a tenant of a lane has had, the oldest first.
func (c *Client) PolicyHistory(ctx context.Context, of schemas.Lineage) ([]*schemas.Policy, error) {
	return c.bus.PolicyHistory(ctx, of)
}

// Replica is a running sampler, and what it makes samples of the tenant in question with.
type Replica struct {
	schemas.Presence
	// Answer is the sampler's last answer to the policy in question; nil while there is none.
	Answer *schemas.Applied
}

// Replicas returns the running samplers of a policy's lane, with what they serve of its tenant, sorted by name, each
// with its answer to that policy; the answer is nil while the sampler has none.
func (c *Client) Replicas(ctx context.Context, p *schemas.Policy) ([]Replica, error) {
	present, err := c.bus.Present(ctx)
	if err != nil {
		return nil, err
	}
	answers, err := c.bus.Applied(ctx, p.Lineage())
	if err != nil {
		return nil, err
	}
	var out []Replica
	for _, s := range present {
		if s.Service != schemas.ServiceSampler || s.Lane != p.Lane {
			continue
		}
		r := Replica{Presence: s.Serving(p.Tenant)}
		for _, a := range answers {
			if a.Instance == s.Instance && a.PolicyVersion == p.PolicyVersion {
				r.Answer = a
			}
		}
		out = append(out, r)
	}
	slices.SortFunc(out, func(a, b Replica) int { return cmp.Compare(a.Instance, b.Instance) })
	return out, nil
}

const pollEvery = 20 * time.Millisecond

// AwaitPolicy waits until every running sampler of the lane has answered a pushed policy, or serves a later one, and
// returns the samplers with their answers, which may be refusals. If ctx ends before, it returns them as they are,
// with ctx's error.
func (c *Client) AwaitPolicy(ctx context.Context, p *schemas.Policy) ([]Replica, error) {
	for {
		replicas, err := c.Replicas(ctx, p)
		if err != nil {
			return nil, err
		}
		late := slices.ContainsFunc(replicas, func(r Replica) bool {
			// A sampler that uses it and still says that it loads it will answer soon.
			return r.Answer == nil && (r.PolicyVersion == nil || *r.PolicyVersion < p.PolicyVersion ||
				r.Loading != nil && *r.Loading == p.PolicyVersion)
		})
		if !late {
			return replicas, nil
		}
		if err := bus.Pause(ctx, pollEvery); err != nil {
			return replicas, err
		}
	}
}
