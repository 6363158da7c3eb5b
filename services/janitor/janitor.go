// Package janitor frees what nobody needs any more: whole groups that are closed, by the rules of
// its settings, and blobs that nothing names. It never touches an open group, nor one of an
// open batch, nor what a durable consumer has not read yet.
package janitor

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/instrument"
)

// Config of the janitor. Without a rule it frees nothing.
type Config struct {
	// Above frees the oldest groups while a stream is fuller than so many percent of its limit,
	// down to four fifths of that; 0: never.
	Above int `koanf:"gc_above" help:"free the oldest closed groups while a stream is fuller than this share of its limit, in percent; 0 for never"`
	// Age frees groups that closed so long ago; 0: never.
	Age time.Duration `koanf:"gc_age" help:"free groups that closed so long ago; 0 for never"`
	// Read frees groups that every durable consumer of their results has acknowledged; where
	// there is none, nothing.
	Read bool `koanf:"gc_read" help:"free groups once every durable consumer of advantages has acknowledged them; without such a consumer, none"`
	// Grace is how long a group stays after it closed, whatever the rules say; so long blobs stay that
	// nothing names.
	Grace time.Duration `koanf:"gc_grace" help:"how long a closed group stays whatever the rules say"`
	// Every is the pause between two passes.
	Every time.Duration `koanf:"gc_every" help:"pause between two looks of the janitor"`
	// Run bounds it to one run; empty: all.
	Run schemas.Run `koanf:"-"`
	// Metrics is where it counts; nil: nowhere.
	Metrics prometheus.Registerer `koanf:"-"`
}

// sweepEvery is the least time between two looks of Run for blobs that nothing names: each reads
// what names blobs, and they stay for bus.BlobGrace anyway.
const sweepEvery = bus.BlobGrace / 8

// sweeps is when Run looked for such blobs last, and when it freed a group last: blobs of that go
// some time later.
type sweeps struct{ swept, freed time.Time }

// due says whether to look for blobs after a pass; without s, always.
func (s *sweeps) due(r *Report, grace time.Duration, full bool) bool {
	if s == nil {
		return true
	}
	now := time.Now()
	if r.Groups > 0 {
		s.freed = now
	}
	if now.Sub(s.swept) < sweepEvery || now.Sub(s.freed) > grace+2*sweepEvery && !full {
		return false
	}
	s.swept = now
	return true
}

// MinGrace is the least grace: whoever reads a result as it comes has so long to read the rest of its group.
const MinGrace = time.Second

// DefaultConfig has no rule.
func DefaultConfig() Config { return Config{Grace: 10 * time.Minute, Every: 10 * time.Second} }

// Rules says whether there is any by which something is freed.
func (c Config) Rules() bool { return c.Above > 0 || c.Age > 0 || c.Read }

// Validate joins every fault by field name.
func (c Config) Validate() error {
	var errs []error
	if c.Above < 0 || c.Above > 95 {
		errs = append(errs, fmt.Errorf("gc_above: %d; must be 0 (never) to 95 percent", c.Above))
	}
	if c.Age < 0 {
		errs = append(errs, fmt.Errorf("gc_age: %v; must not be negative", c.Age))
	}
	if c.Grace < MinGrace {
		errs = append(errs, fmt.Errorf("gc_grace: %v; must be at least %v", c.Grace, MinGrace))
	}
	if c.Every < 100*time.Millisecond {
		errs = append(errs, fmt.Errorf("gc_every: %v; must be at least 100ms", c.Every))
	}
	return errors.Join(errs...)
}

// Report is what a pass freed, or with dry would free.
type Report struct {
	Groups int `json:"groups"`
	// Messages and Bytes are by stream; bytes are estimated from the mean size of its messages.
	Messages map[string]uint64 `json:"messages"`
	Bytes    map[string]uint64 `json:"bytes"`
	// Blobs is the number of blobs that nothing names.
	Blobs int `json:"blobs"`
	// Kept counts closed groups that a rule would free, by why they stay.
	Kept map[string]int `json:"kept"`
	// Oldest and Newest are when the first and the last of the groups closed.
	Oldest time.Time `json:"oldest"`
	Newest time.Time `json:"newest"`
}

// Total is the bytes over all streams.
func (r *Report) Total() (n uint64) {
	for _, b := range r.Bytes {
		n += b
	}
	return n
}

// Run makes passes until ctx ends. What fails is logged, and tried again at the next pass.
func Run(ctx context.Context, cfg Config, b *bus.Bus, log zerolog.Logger) error {
	if err := cfg.Validate(); err != nil {
		return fmt.Errorf("janitor config: %w", err)
	}
	if !cfg.Rules() {
		return nil
	}
	set := instrument.New(cfg.Metrics, "janitor")
	groups := set.Counter("freed_groups_total", "closed groups that the janitor has freed").WithLabelValues()
	bytes := set.Counter("freed_bytes_total", "bytes that the janitor has freed, about").WithLabelValues()
	gone := set.Counter("freed_blobs_total", "blobs that nothing named").WithLabelValues()
	kept := set.Gauge("kept_groups", "closed groups that a rule would free and something keeps").WithLabelValues()
	tick := time.NewTicker(cfg.Every)
	defer tick.Stop()
	var blobs sweeps
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		r, err := look(ctx, cfg, b, false, &blobs)
		if err != nil && ctx.Err() == nil {
			log.Warn().Err(err).Msg("not all could be freed; tried again")
		}
		if r == nil {
			continue
		}
		held := 0
		for _, n := range r.Kept {
			held += n
		}
		kept.Set(float64(held))
		groups.Add(float64(r.Groups))
		bytes.Add(float64(r.Total()))
		gone.Add(float64(r.Blobs))
		if r.Groups > 0 || r.Blobs > 0 {
			log.Info().Int("groups", r.Groups).Uint64("bytes", r.Total()).Int("blobs", r.Blobs).Any("kept", r.Kept).Msg("freed")
		}
	}
}

// Pass looks once and frees what the rules say; dry: it only says what that would be. What it
// returns with an error was freed before.
func Pass(ctx context.Context, cfg Config, b *bus.Bus, dry bool) (*Report, error) {
	return look(ctx, cfg, b, dry, nil)
}

// look is Pass, which looks for blobs when it is due.
func look(ctx context.Context, cfg Config, b *bus.Bus, dry bool, s *sweeps) (*Report, error) {
	r := &Report{Messages: map[string]uint64{}, Bytes: map[string]uint64{}, Kept: map[string]int{}}
	if err := cfg.Validate(); err != nil {
		return r, err
	}
	p := &pass{cfg: cfg, b: b, dry: dry, report: r}
	if err := p.look(ctx); err != nil {
		return r, err
	}
	grace := max(cfg.Grace, bus.BlobGrace)
	err := p.groups(ctx)
	if err != nil || !s.due(r, grace, p.above(bus.BlobStream)) {
		return r, err
	}
	r.Blobs, err = b.SweepBlobs(ctx, grace, dry)
	return r, err
}
