package weights

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// lineage is what a sampler knows of the versions of one tenant.
type lineage struct {
	newest  *Loaded         // the current weights; of a tenant nil before the first, and closed where held lacks them
	wanted  *schemas.Policy // the newest policy that is not handled yet; nil: none
	epoch   int64           // the highest of the policies: what is below it is refused
	refused *schemas.Policy // the last policy that was refused: it is not tried again; nil: none
	refusal error           // why
	loading *int64          // the version that is loaded, or waits for memory; nil: none
	failed  time.Time       // when loading it failed for what may pass; zero: it did not
}

// lineage returns what is known of a tenant; empty: nothing. Lock held.
func (v *Versions) lineage(tenant schemas.Tenant) *lineage {
	if tenant == schemas.TenantMain || tenant == "" {
		return &v.main
	}
	return cmp.Or(v.tenants[tenant], &lineage{})
}

// all returns what is known of all tenants, of main first. Lock held.
func (v *Versions) all() []*lineage {
	out := []*lineage{&v.main}
	for _, t := range slices.Sorted(maps.Keys(v.tenants)) {
		out = append(out, v.tenants[t])
	}
	return out
}

// Want notes that p is the newest policy of its tenant; Follow loads it. Tenants are added up to MaxTenants.
func (v *Versions) Want(p *schemas.Policy) {
	v.mu.Lock()
	defer v.mu.Unlock()
	l := v.lineage(p.Tenant)
	if l != &v.main && v.tenants[p.Tenant] == nil {
		if len(v.tenants) == schemas.MaxTenants { // it did not come by AddTenant
			v.leftOut = p.Tenant
			return
		}
		v.tenants[p.Tenant] = l
	}
	l.wanted, l.epoch, l.failed = p, max(l.epoch, p.Epoch), time.Time{}
	signal(v.news)
}

// Forget lets go of a tenant that was removed: one of its name that is begun later has other weights under the same
// numbers. It waits for a version that is being loaded.
func (v *Versions) Forget(ctx context.Context, tenant schemas.Tenant) {
	if tenant == schemas.TenantMain {
		return // a lane always has it
	}
	unlock, err := v.lockLoads(ctx)
	if err != nil {
		return
	}
	defer unlock()
	v.forget(tenant)
	signal(v.news)
}

// forget is Forget where nothing is being loaded.
func (v *Versions) forget(tenant schemas.Tenant) {
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.tenants, tenant)
	v.held = slices.DeleteFunc(v.held, func(w *Loaded) bool {
		if w.Policy.Tenant != tenant {
			return false
		}
		w.retired = true
		v.closeUnused(w)
		return true
	})
}

// knows reports whether a tenant has had a policy, and was not forgotten.
func (v *Versions) knows(tenant schemas.Tenant) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return tenant == schemas.TenantMain || v.tenants[tenant] != nil
}

// forgetRemoved forgets the tenant of its newest policy if it was removed and begun again while the news did not come.
func (v *Versions) forgetRemoved(ctx context.Context, newest *schemas.Policy) error {
	last := v.NewestOf(newest.Tenant)
	if last == nil || newest.Tenant == schemas.TenantMain {
		return nil
	}
	was, err := v.options.Bus.PolicyOf(ctx, newest.Lineage(), last.Version())
	if errors.Is(err, bus.ErrNotFound) || err == nil && was.WeightsDigest != last.Policy.WeightsDigest {
		v.forget(newest.Tenant)
		v.Want(newest)
		return nil
	}
	return err
}
