package prove

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/estimator"
	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/schemas"
)

// findUpdate finds the weights that are asked for in the archive, and the update that made them; nil where there is
// none, which the report says.
func (p *prover) findUpdate() (*schemas.Update, error) {
	if p.options.Adapter != "" {
		return p.ofAdapter()
	}
	if len(p.archive.updates) == 0 {
		p.add(LinkChain, "", Unchecked, "no trainer told of an update of run %s", p.archive.run)
		return nil, nil
	}
	whose, err := p.whose()
	if err != nil {
		return nil, err
	}
	if p.options.Version < 0 {
		updates := slices.DeleteFunc(slices.Clone(p.archive.updates),
			func(u *schemas.Update) bool { return u.Lineage() != whose })
		newest := slices.MaxFunc(updates, func(a, b *schemas.Update) int { return int(a.Step - b.Step) })
		p.report.Weights = newest.WeightsDigest
		p.checkMade(newest)
		return newest, nil
	}
	if err := p.checkVersion(whose, p.options.Version); err != nil {
		return nil, err
	}
	return p.updateOf(p.report.Weights, whose, fmt.Sprintf("version %d", p.options.Version)), nil
}

// of reports whether weights are those of the lane and tenant that are asked for.
func (o *Options) of(l schemas.Lineage) bool {
	return (o.Lane == "" || o.Lane == l.Lane) && (o.Tenant == "" || o.Tenant == l.Tenant)
}

// whose returns the lane and tenant whose weights are asked for: those of the newest update, if they are not named. Of
// several tenants with updates one must be named.
func (p *prover) whose() (whose schemas.Lineage, err error) {
	step, tenants := int64(0), []string{}
	for _, u := range p.archive.updates {
		of := u.Lineage()
		if !p.options.of(of) {
			continue
		}
		if !slices.Contains(tenants, string(of.Tenant)) {
			tenants = append(tenants, string(of.Tenant))
		}
		if u.Step > step {
			whose, step = of, u.Step
		}
	}
	switch slices.Sort(tenants); len(tenants) {
	case 0:
		return whose, &SettingError{fmt.Errorf("lane %q, tenant %q: no update of them is in the archive",
			p.options.Lane, p.options.Tenant)}
	case 1:
		return whose, nil
	}
	return whose, &SettingError{fmt.Errorf("tenants %s have updates in the archive; say of which by --tenant",
		strings.Join(tenants, ", "))}
}

// nameOf names an update, and its tenant where it is not the lane's own.
func nameOf(u *schemas.Update) string {
	return fmt.Sprintf("update %d%s", u.Step, ofTenant(u.Lineage()))
}

func ofTenant(l schemas.Lineage) string {
	if l.Tenant == schemas.TenantMain {
		return ""
	}
	return " of " + string(l.Tenant)
}

// checkMade adds the link that the version which an update names has the weights that it made.
func (p *prover) checkMade(u *schemas.Update) {
	policy, of := p.version(u.Lineage(), u.PolicyVersion), nameOf(u)
	switch {
	case policy == nil:
		p.add(LinkWeights, of, Unchecked, "version %d, which has its weights, is not in the archive", u.PolicyVersion)
	case u.WeightsDigest != "" && u.WeightsDigest != policy.WeightsDigest:
		p.add(LinkWeights, of, Broken, "it made %.16s, version %d has %.16s", u.WeightsDigest, u.PolicyVersion,
			policy.WeightsDigest)
	default:
		_ = p.checkVersion(u.Lineage(), u.PolicyVersion) // it is there
	}
}

// version returns a version in the archive; nil: it is not there.
func (p *prover) version(whose schemas.Lineage, version int64) *schemas.Policy {
	for _, x := range p.archive.policies {
		if x.PolicyVersion == version && x.Lineage() == whose {
			return x
		}
	}
	return nil
}

// checkVersion adds the link that the file of a version in the archive gives the digest of its weights.
func (p *prover) checkVersion(whose schemas.Lineage, version int64) error {
	policy := p.version(whose, version)
	if policy == nil {
		return &SettingError{fmt.Errorf("version %d%s: not in the archive; must be one of %v", version,
			ofTenant(whose), p.versions(whose))}
	}
	of := fmt.Sprintf("version %d%s", version, ofTenant(whose))
	if p.report.Weights == "" {
		p.report.Weights = policy.WeightsDigest
	}
	switch {
	case policy.IsCheckpoint():
		p.add(LinkWeights, of, Holds, "the checkpoint %.16s itself", policy.BaseDigest)
	case policy.Adapter == nil:
		p.add(LinkWeights, of, Unchecked, "a whole network, whose files are not in the archive")
	case p.archive.blobs[policy.Adapter.File.Digest] == nil:
		p.add(LinkWeights, of, Unchecked, "its adapter %.12s is not in the archive", policy.Adapter.File.Digest)
	default:
		p.checkWeights(of, policy, p.archive.blobs[policy.Adapter.File.Digest], policy.Adapter.Config)
	}
	return nil
}

func (p *prover) versions(whose schemas.Lineage) (out []int64) {
	for _, x := range p.archive.policies {
		if x.Lineage() == whose {
			out = append(out, x.PolicyVersion)
		}
	}
	return out
}

// checkWeights adds the link that files of an adapter give the digest of a policy's weights.
func (p *prover) checkWeights(of string, policy *schemas.Policy, file, config []byte) {
	a, err := lora.Parse("adapter", file, config)
	if err != nil {
		p.add(LinkWeights, of, Broken, "%v", err)
		return
	}
	got := lora.WeightsDigest(policy.BaseDigest, lora.Weighted{Adapter: a, Weight: policy.Adapter.Scale})
	if got != policy.WeightsDigest {
		p.add(LinkWeights, of, Broken, "the files give %.16s, the version has %.16s", got, policy.WeightsDigest)
		return
	}
	p.add(LinkWeights, of, Holds, "%d bytes of the adapter, its settings and checkpoint %.16s give %.16s", len(file),
		policy.BaseDigest, got)
}

// ofAdapter finds the version that has the adapter's files, or the update whose running average they are.
func (p *prover) ofAdapter() (*schemas.Update, error) {
	a, err := lora.Open(p.options.Adapter)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, &SettingError{err}
	}
	if err != nil {
		p.add(LinkWeights, p.options.Adapter, Broken, "%v", err)
		return nil, nil
	}
	sum := sha256.Sum256(a.File())
	digest := hex.EncodeToString(sum[:])
	for _, policy := range p.archive.policies {
		if policy.Adapter == nil || policy.Adapter.File.Digest != digest || !p.options.of(policy.Lineage()) {
			continue
		}
		if !p.sameConfig(a, policy) {
			return nil, nil
		}
		p.report.Weights = policy.WeightsDigest
		of := fmt.Sprintf("version %d%s", policy.PolicyVersion, ofTenant(policy.Lineage()))
		p.checkWeights(of, policy, a.File(), a.Config())
		return p.updateOf(policy.WeightsDigest, policy.Lineage(), of), nil
	}
	if u := p.averageOf(digest); u != nil {
		for _, policy := range p.archive.policies {
			if policy.WeightsDigest == u.WeightsDigest && policy.Adapter != nil && !p.sameConfig(a, policy) {
				return nil, nil
			}
		}
		p.report.Weights = u.WeightsDigest
		p.add(LinkWeights, nameOf(u), Holds, "%d bytes of the adapter are the running average "+
			"at this update, by SHA-256 %.16s", len(a.File()), digest)
		return u, nil
	}
	p.add(LinkWeights, p.options.Adapter, Broken, "%s", p.nearest(a.File(), digest))
	return nil, nil
}

// sameConfig reports whether an adapter has the settings of a version's, to the byte, and adds a broken link if not.
func (p *prover) sameConfig(a *lora.Adapter, policy *schemas.Policy) bool {
	if want := policy.Adapter.Config; !bytes.Equal(a.Config(), want) {
		p.add(LinkWeights, p.options.Adapter, Broken, "%s: %s version %d", lora.PEFTConfig, differs(a.Config(), want),
			policy.PolicyVersion)
		return false
	}
	return true
}

// averageOf returns the first update whose running average has a digest; nil: there is none.
func (p *prover) averageOf(digest string) *schemas.Update {
	i := slices.IndexFunc(p.archive.updates, func(u *schemas.Update) bool {
		return u.AverageDigest == digest && p.options.of(u.Lineage())
	})
	if i < 0 {
		return nil
	}
	return p.archive.updates[i]
}

// nearest says how a file differs from the adapter of the archive that is most like it.
func (p *prover) nearest(file []byte, digest string) string {
	least, said := len(file)+1, fmt.Sprintf("%s: SHA-256 %.16s is that of no version%s in the archive",
		lora.PEFTWeights, digest, ofTenant(p.options.Lane.Of(p.options.Tenant)))
	for _, policy := range p.archive.policies {
		if policy.Adapter == nil || !p.options.of(policy.Lineage()) {
			continue
		}
		other := p.archive.blobs[policy.Adapter.File.Digest]
		if n := apart(file, other); len(other) == len(file) && n < least && n < len(file)/100+2 {
			least = n
			said = fmt.Sprintf("%s: %s version %d", lora.PEFTWeights, differs(file, other), policy.PolicyVersion)
		}
	}
	return said
}

// apart counts the bytes in which two files differ.
func apart(a, b []byte) (n int) {
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			n++
		}
	}
	return n + max(len(a), len(b)) - min(len(a), len(b))
}

// differs says in how many bytes a file differs from another, and where first.
func differs(a, b []byte) string {
	at := 0
	for at < min(len(a), len(b)) && a[at] == b[at] {
		at++
	}
	return fmt.Sprintf("in %d of %d bytes, the first at %d, other than", apart(a, b), max(len(a), len(b)), at)
}

// updateOf returns the first update that made the weights of a version; nil, which the report says: there is none.
func (p *prover) updateOf(weights string, whose schemas.Lineage, of string) (u *schemas.Update) {
	for _, x := range p.archive.updates {
		if x.Lineage() == whose && x.WeightsDigest == weights && x.WeightsBefore != weights &&
			(u == nil || x.Step < u.Step) {
			u = x
		}
	}
	if u == nil && !slices.ContainsFunc(p.archive.policies, func(x *schemas.Policy) bool {
		return x.IsCheckpoint() && x.WeightsDigest == weights
	}) {
		p.add(LinkChain, of, Unchecked, "no trainer told of an update that made these weights")
	}
	return u
}

// chain returns an update and those before it, newest first, and adds the link that each begins with the weights of the
// one before, and the first with the checkpoint.
func (p *prover) chain(last *schemas.Update) []*schemas.Update {
	list, of := []*schemas.Update{last}, nameOf(last)
	for u := last; ; {
		switch base := p.baseOf(u); {
		case u.WeightsBefore == "":
			p.add(LinkChain, of, Unchecked, "update %d does not tell what it began with: an older or another trainer",
				u.Step)
			return list
		case u.WeightsBefore == base:
			p.add(LinkChain, of, Holds, "%d updates, each from the weights of the one before, back to the checkpoint "+
				"%.16s", len(list), base)
			return list
		}
		i := slices.IndexFunc(p.archive.updates, func(x *schemas.Update) bool {
			return x.Lineage() == u.Lineage() && x.Trainer == u.Trainer && x.Step == u.Step-1
		})
		if i < 0 {
			p.add(LinkChain, of, Unchecked, "update %d, before update %d, is not in the archive", u.Step-1, u.Step)
			return list
		}
		before := p.archive.updates[i]
		if before.WeightsDigest != u.WeightsBefore {
			p.add(LinkChain, of, Broken, "update %d began with %.16s, update %d had made %.16s", u.Step,
				u.WeightsBefore, before.Step, before.WeightsDigest)
			return list
		}
		u = before
		list = append(list, u)
	}
}

// baseOf returns the digest of the checkpoint of an update's lane; empty: the archive does not say.
func (p *prover) baseOf(u *schemas.Update) string {
	for _, x := range p.archive.policies {
		if x.Lane == u.Lane {
			return x.BaseDigest
		}
	}
	return ""
}

// checkBatch adds the link that what is stored of an update's batches gives its digest, and returns their groups; none
// where they are not all there.
func (p *prover) checkBatch(u *schemas.Update, of string) (all []schemas.TrainedGroup) {
	if len(u.Batches) == 0 || u.BatchDigest == "" {
		p.add(LinkBatch, of, Unchecked, "it does not name what it learned from")
		return nil
	}
	digests, samples := []map[string]string{}, 0
	for _, id := range u.Batches {
		b := p.archive.batches[id]
		if b == nil {
			p.add(LinkBatch, of, Unchecked, "batch %s is not in the archive", id)
			return nil
		}
		var groups []schemas.TrainedGroup
		for _, uid := range slices.Sorted(slices.Values(b.UIDs)) {
			a := p.archive.advantages[uid]
			if a == nil {
				p.add(LinkBatch, of, Unchecked, "batch %s: the result of group %s is not in the archive", id, uid)
				return nil
			}
			if r := p.archive.records[uid]; r != nil && len(r.Stages) == 0 && r.Lineage() != u.Lineage() {
				p.add(LinkBatch, of, Broken, "batch %s: group %s was made with the weights of %s, the update is of %s",
					id, uid, r.Lineage(), u.Lineage())
				return nil
			}
			groups, samples = append(groups, schemas.TrainedGroup{Advantage: a}), samples+len(a.Members)
		}
		found, lacks := p.digestsOf(groups)
		if lacks != "" {
			p.add(LinkBatch, of, Unchecked, "batch %s: %s", id, lacks)
			return nil
		}
		digests, all = append(digests, found), append(all, groups...)
	}
	names, got := strings.Join(u.Batches, ", "), []string{}
	for _, learned := range slices.Sorted(maps.Keys(digests[0])) {
		var each []string
		for _, of := range digests {
			each = append(each, of[learned])
		}
		joined := schemas.BatchDigests(each)
		if joined == u.BatchDigest {
			p.add(LinkBatch, of, Holds, "batch %s: %d samples of %d groups give its digest %.16s%s", names, samples,
				len(all), u.BatchDigest, learned)
			return all
		}
		got = append(got, fmt.Sprintf("%.16s%s", joined, learned))
	}
	p.add(LinkBatch, of, Broken, "batch %s gives %s, the update names %.16s", names, strings.Join(got, ", "),
		u.BatchDigest)
	return nil
}

// choose returns the groups that are computed again: the first ones with as many samples as are asked for, or all
// where one is compared with the others of its batch.
func (p *prover) choose(groups []schemas.TrainedGroup) []schemas.TrainedGroup {
	n := 0
	for i, g := range groups {
		if spec := p.archive.records[g.UID]; spec == nil || needsBatch(&spec.Group) {
			return groups
		}
		if n += len(g.Members); n >= p.options.Samples && !p.options.All {
			return groups[:i+1]
		}
	}
	return groups
}

// needsBatch reports whether the advantages of a group depend on other groups.
func needsBatch(g *schemas.Group) bool {
	c, err := estimator.Of(g.Advantage)
	return err != nil || c.NeedsBatch()
}
