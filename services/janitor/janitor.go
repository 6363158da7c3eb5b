// Package janitor frees what nobody needs any more: whole groups that are closed, by the rules of its settings, with
// their batches and prompts, and blobs that nothing names. It never touches an open group, nor one of an open batch,
// nor what a durable consumer has not read yet.
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

// Config of the janitor. Without a rule it frees no group, and blobs that nothing names once the object store is half
// full.
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

// sweepEvery is for how long an index of the blobs that stored events name is in use: to make one is to read all of
// them, and blobs stay for bus.BlobGrace anyway.
const sweepEvery = bus.BlobGrace / 8

// sweeps is the last index of blobs, when it was made, and when a group was freed last: blobs of that go
// some time later.
type sweeps struct {
	index        *bus.BlobIndex
	swept, freed time.Time
	// once: the pass is the only one.
	once bool
}

// due says whether to look for blobs.
func (s *sweeps) due(p *pass) bool {
	now := time.Now()
	if p.report.Groups > 0 {
		s.freed = now
	}
	if now.Sub(s.swept) < sweepEvery && !s.once {
		return false
	}
	blobs := p.streams[bus.BlobStream]
	full := p.pressing[bus.BlobStream] ||
		blobs != nil && blobs.MaxBytes > 0 && blobs.Bytes > uint64(blobs.MaxBytes)/100*fullBlobs
	if !s.once && !full && now.Sub(s.freed) > p.cfg.blobGrace()+2*sweepEvery {
		return false
	}
	s.swept = now
	return true
}

// fullBlobs is the share of the object store, in percent, from which on what nothing names is freed without a rule:
// nobody can ask for it.
const fullBlobs = 50

// MinGrace is the least grace: whoever reads a result as it comes has so long to read the rest of its group.
const MinGrace = time.Second

// DefaultConfig has no rule.
func DefaultConfig() Config { return Config{Grace: 10 * time.Minute, Every: 10 * time.Second} }

// blobGrace is how long a blob stays that nothing names.
func (c Config) blobGrace() time.Duration { return max(c.Grace, bus.BlobGrace) }

// Rules says whether there is any by which groups are freed.
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

// meters are what the janitor shows of itself.
type meters struct {
	groups, bytes, gone prometheus.Counter
	kept, due, oldest   prometheus.Gauge
	look                prometheus.Observer
}

func newMeters(r prometheus.Registerer) *meters {
	set := instrument.New(r, "janitor")
	return &meters{
		groups: set.Counter("freed_groups_total", "closed groups that the janitor has freed").WithLabelValues(),
		bytes:  set.Counter("freed_bytes_total", "bytes that the janitor has freed, about").WithLabelValues(),
		gone:   set.Counter("freed_blobs_total", "blobs that nothing named").WithLabelValues(),
		kept:   set.Gauge("kept_groups", "closed groups that a rule would free and something keeps").WithLabelValues(),
		due:    set.Gauge("due_groups", "closed groups that a rule would free, counted when a look begins, less those that it has freed").WithLabelValues(),
		oldest: set.Gauge("oldest_due_age", "how many seconds ago the oldest group that is due closed; it grows where the janitor falls behind; 0 where none is").WithLabelValues(),
		look:   set.Seconds("look_seconds", "how long a look of the janitor took").WithLabelValues(),
	}
}

// Run makes passes until ctx ends. What fails is logged, and tried again at the next pass.
func Run(ctx context.Context, cfg Config, b *bus.Bus, log zerolog.Logger) error {
	if err := cfg.Validate(); err != nil {
		return fmt.Errorf("janitor config: %w", err)
	}
	m := newMeters(cfg.Metrics)
	tick := time.NewTicker(cfg.Every)
	defer tick.Stop()
	var blobs sweeps
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		began := time.Now()
		r, err := look(ctx, cfg, b, false, &blobs, m)
		m.look.Observe(time.Since(began).Seconds())
		if err != nil && ctx.Err() == nil {
			if errors.Is(err, bus.ErrPermission) && !cfg.Rules() {
				return nil
			}
			level := zerolog.WarnLevel
			if !cfg.Rules() { // nobody waits for it
				level = zerolog.DebugLevel
			}
			log.WithLevel(level).Err(err).Msg("not all could be freed; tried again")
		}
		held := 0
		for _, n := range r.Kept {
			held += n
		}
		m.kept.Set(float64(held))
		m.groups.Add(float64(r.Groups))
		m.bytes.Add(float64(r.Total()))
		m.gone.Add(float64(r.Blobs))
		if r.Groups > 0 || r.Blobs > 0 {
			log.Info().Int("groups", r.Groups).Uint64("bytes", r.Total()).Int("blobs", r.Blobs).Any("kept", r.Kept).Msg("freed")
		}
	}
}

// Pass looks once and frees what the rules say, and the blobs that nothing names; dry: it only says what that would be.
// What it returns with an error was freed before.
func Pass(ctx context.Context, cfg Config, b *bus.Bus, dry bool) (*Report, error) {
	return look(ctx, cfg, b, dry, &sweeps{once: true}, nil)
}

func look(ctx context.Context, cfg Config, b *bus.Bus, dry bool, s *sweeps, m *meters) (*Report, error) {
	r := &Report{Messages: map[string]uint64{}, Bytes: map[string]uint64{}, Kept: map[string]int{}}
	if err := cfg.Validate(); err != nil {
		return r, err
	}
	p := &pass{
		cfg: cfg, b: b, dry: dry, blobs: s, meters: m, report: r,
		pressing: map[string]bool{}, left: map[string]uint64{}, gone: map[address]bool{},
	}
	return r, p.look(ctx)
}
