// Package janitor frees stored events that are not needed any more. A pass frees whole groups that are closed, oldest
// first, by the rules of Config, with their batches and prompts; a group is due when a rule would free it. A pass also
// frees blobs that no stored event names: a sweep makes an index of the named ones. It never frees an open group, a
// group of an open batch, or what a durable consumer of another program has not read yet.
//
// A stream is pressing while it is fuller than the percentage of its limit that Config.Above allows (its mark). A
// floor is how far a durable consumer has acknowledged a stream. A dry pass frees nothing and only counts.
//
// A pass runs these in order: readSizes, sweep, countDue, then freeDue, which frees chunks: freeChunk frees each
// group with freeIfRead and freeGroup, each batch with freeBatch, then freeBlobs; then freePrompts and, of
// prompts that say so, freeReadSteps. An error is of the server: it ends the pass, and the next pass goes on.
package janitor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/counters"
	"github.com/meander-rl/meander/pkg/rules"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/instrument"
)

// Config of the janitor. Without a rule it frees no group, and blobs that nothing names once the object store is half
// full. The help of its fields says what they are.
type Config struct {
	// Above: a fuller stream is brought down to four fifths of that.
	Above int           `key:"gc_above" range:"0..95" help:"free the oldest closed groups while a stream is fuller than this share of its limit, in percent; 0 for never"`
	Age   time.Duration `key:"gc_age" range:"0s.." help:"free groups that closed so long ago, such as 48h; 0 for never"`
	Read  bool          `key:"gc_read" help:"free groups once every durable consumer of advantages has acknowledged them; without such a consumer, none"`
	// Grace is also how long blobs that no event names stay. The least one leaves a reader of results the time to read
	// the rest of the group.
	Grace time.Duration `key:"gc_grace" range:"1s.." help:"how long a closed group stays whatever the rules say"`
	Every time.Duration `key:"gc_every" range:"100ms.." help:"pause between two looks of the janitor"`
	// WeightsDir is the folder of weights that are pushed by path; empty: there is none.
	WeightsDir string `key:"gc_weights_dir" help:"shared folder of weights that are pushed by path; the copies that pushes made there are freed when nothing needs them"`
	// Run limits the janitor to one run; empty: all.
	Run schemas.Run `key:"-"`
	// Metrics is where the counters are registered; nil: they are not shown.
	Metrics prometheus.Registerer `key:"-"`
}

// sweepEvery is how long an index of the named blobs is used before a new one is made. Making one reads all stored
// events, and blobs stay for bus.BlobGrace anyway.
const sweepEvery = bus.BlobGrace / 8

// blobSweeps keeps the last index of named blobs, when it was made, and when the last group was freed: the blobs of
// that group can go some time later.
type blobSweeps struct {
	index        *bus.BlobIndex
	swept, freed time.Time
	// versions is how many policies there were when the shared folder was swept: with each new one an older one may go.
	versions uint64
	// once says that this is a single pass, not one of many.
	once bool
}

// startSweep reports whether the pass should read all events for a new index of named blobs, and notes the time if
// so. There is something to look for after a freed group or with a full object store, and in the shared folder after
// a new policy.
func (s *blobSweeps) startSweep(p *pass) bool {
	now := time.Now()
	if now.Sub(s.swept) < sweepEvery && !s.once {
		return false
	}
	blobs := p.streams[schemas.StreamBlobBucket]
	wanted := p.pressing[schemas.StreamBlobBucket] ||
		blobs != nil && blobs.MaxBytes > 0 && blobs.Bytes > uint64(blobs.MaxBytes)/100*fullBlobs
	policies := p.streams[schemas.StreamPolicies]
	if p.cfg.WeightsDir != "" && policies != nil && policies.Messages != s.versions {
		wanted = true
	}
	if !s.once && !wanted && now.Sub(s.freed) > p.cfg.blobGrace()+2*sweepEvery {
		return false
	}
	s.swept = now
	return true
}

// fullBlobs is a share of the object store's limit, in percent. Above it unnamed blobs are freed even without a rule:
// no reader can ask for them.
const fullBlobs = 50

// DefaultConfig has no rule.
func DefaultConfig() Config { return Config{Grace: 10 * time.Minute, Every: 10 * time.Second} }

func (c Config) blobGrace() time.Duration { return max(c.Grace, bus.BlobGrace) }

// Rules reports whether any rule that frees groups is set.
func (c Config) Rules() bool { return c.Above > 0 || c.Age > 0 || c.Read }

// Validate checks the rules. It returns all faults, joined, each with the name of its field.
func (c Config) Validate() error { return schemas.CheckFields(&c) }

// Report says what a pass freed, or what a dry pass would free.
type Report struct {
	Groups int `json:"groups"`
	// Messages and Bytes are by stream. Bytes are estimated from the mean size of the stream's messages;
	// in a dry pass, from those of the run.
	Messages map[string]uint64 `json:"messages"`
	Bytes    map[string]uint64 `json:"bytes"`
	// Blobs counts the blobs that no stored event names.
	Blobs int `json:"blobs"`
	// WeightsFiles counts the files that went from the shared folder, WeightsBytes is their size.
	WeightsFiles int    `json:"weights_files"`
	WeightsBytes uint64 `json:"weights_bytes"`
	// Kept counts closed groups that a rule would free, by the reason why they stay.
	Kept map[string]int `json:"kept"`
	// Oldest and Newest are the closing times of the first and the last freed group.
	Oldest time.Time `json:"oldest"`
	Newest time.Time `json:"newest"`
}

// Total returns the freed bytes of all streams.
func (r *Report) Total() (n uint64) {
	for _, b := range r.Bytes {
		n += b
	}
	return n
}

type metrics struct {
	groups, bytes, gone prometheus.Counter
	kept, due, oldest   prometheus.Gauge
	look                prometheus.Observer
	alarm               func(*schemas.Alarm)
}

// newMetrics registers the metrics of the janitor on r.
func newMetrics(r prometheus.Registerer) *metrics {
	set := instrument.New(r, "janitor")
	alarms := set.Counter("alarms_total", "runs that have broken a rule", "rule")
	for _, rule := range schemas.Rules {
		alarms.WithLabelValues(rule.Name) // so that the first one is an increase
	}
	return &metrics{
		groups: set.Counter("freed_groups_total", "closed groups that the janitor has freed").WithLabelValues(),
		bytes:  set.Counter("freed_bytes_total", "bytes that the janitor has freed, about").WithLabelValues(),
		gone:   set.Counter("freed_blobs_total", "blobs that nothing named").WithLabelValues(),
		kept:   set.Gauge("kept_groups", "closed groups that a rule would free and something keeps").WithLabelValues(),
		due: set.Gauge("due_groups",
			"closed groups that a rule would free, counted when a look begins, less those that it has "+
				"freed").WithLabelValues(),
		oldest: set.Gauge("oldest_due_age",
			"how many seconds ago the oldest group that is due closed; it grows where the janitor falls behind; 0 "+
				"where none is").WithLabelValues(),
		look:  set.Seconds("look_seconds", "how long a look of the janitor took").WithLabelValues(),
		alarm: func(a *schemas.Alarm) { alarms.WithLabelValues(a.Rule).Inc() },
	}
}

// Run makes a pass every cfg.Every until ctx ends; a pipeline runs it beside its services. It also keeps the counts of
// runs up to date, and looks whether runs break rules. A failure is logged, and
// the next pass tries again. Run returns early, without an error, if this credential may not free anything and there
// is no rule.
func Run(ctx context.Context, cfg Config, b *bus.Bus, log zerolog.Logger) error {
	if err := cfg.Validate(); err != nil {
		return fmt.Errorf("janitor config: %w", err)
	}
	m := newMetrics(cfg.Metrics)
	tick := time.NewTicker(cfg.Every)
	defer tick.Stop()
	var blobs blobSweeps
	var steps readSteps
	watch := rules.New(b, func(a *schemas.Alarm) {
		m.alarm(a)
		log.Warn().Str("run", string(a.Run)).Str("rule", a.Rule).Bool("paused", a.Paused).Msg(a.Says)
	})
	if cfg.Rules() {
		blobs.freed = time.Now() // by the process before this one, perhaps
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		if err := counters.Advance(ctx, b); err != nil && ctx.Err() == nil {
			log.Debug().Err(err).Msg("counts of runs are not up to date; looks read more")
		}
		if err := watch.Look(ctx); err != nil && ctx.Err() == nil {
			log.Debug().Err(err).Msg("not all rules of runs were looked at; tried again")
		}
		began := time.Now()
		r, err := runPass(ctx, cfg, b, false, &blobs, &steps, m)
		m.look.Observe(time.Since(began).Seconds())
		if err != nil && ctx.Err() == nil {
			if errors.Is(err, bus.ErrPermission) && !cfg.Rules() && cfg.WeightsDir == "" {
				return nil
			}
			level := zerolog.WarnLevel
			if !cfg.Rules() && cfg.WeightsDir == "" { // no user asked for it
				level = zerolog.DebugLevel
			}
			log.WithLevel(level).Err(err).Msg("not all could be freed; tried again")
		}
		keptGroups := 0
		for _, n := range r.Kept {
			keptGroups += n
		}
		m.kept.Set(float64(keptGroups))
		m.groups.Add(float64(r.Groups))
		m.bytes.Add(float64(r.Total()))
		m.gone.Add(float64(r.Blobs))
		if r.Groups > 0 || r.Blobs > 0 || r.WeightsFiles > 0 || r.Messages[schemas.StreamSteps] > 0 {
			log.Info().Int("groups", r.Groups).Uint64("bytes", r.Total()).Int("blobs", r.Blobs).
				Int("weights_files", r.WeightsFiles).Uint64("weights_bytes", r.WeightsBytes).
				Any("kept", r.Kept).Msg("freed")
		}
	}
}

// Pass makes one pass: it frees the groups that the rules name, and the blobs that no event names. With dry it only
// counts them. The report returned beside an error counts what was freed before the error.
func Pass(ctx context.Context, cfg Config, b *bus.Bus, dry bool) (*Report, error) {
	return runPass(ctx, cfg, b, dry, &blobSweeps{once: true}, nil, nil)
}

// runPass makes one pass; Run and Pass share it. steps and metrics are nil where none are kept. The report has what was
// freed before an error, too; an error is of the settings or of the server.
func runPass(
	ctx context.Context, cfg Config, b *bus.Bus, dry bool, s *blobSweeps, steps *readSteps, m *metrics,
) (*Report, error) {
	r := &Report{Messages: map[string]uint64{}, Bytes: map[string]uint64{}, Kept: map[string]int{}}
	if err := cfg.Validate(); err != nil {
		return r, err
	}
	p := &pass{
		cfg: cfg, b: b, dry: dry, blobs: s, steps: steps, metrics: m, report: r,
		pressing: map[string]bool{}, bytesLeft: map[string]uint64{}, freedGroups: map[address]bool{},
		means: map[inStream]uint64{}, closed: map[string]*bus.Message{}, chosen: map[inStream][]string{},
	}
	return r, p.run(ctx)
}

func noun(n int, one string) string {
	if n == 1 {
		return one
	}
	return one + "s"
}

// Lines describes the report for people, one line each; size prints a number of bytes.
func (r *Report) Lines(size func(bytes uint64) string, dry bool) []string {
	freed := "freed"
	if dry {
		freed = "would free"
	}
	out := []string{fmt.Sprintf("%s %d %s, about %s, and %d %s that nothing names", freed, r.Groups,
		noun(r.Groups, "group"), size(r.Total()), r.Blobs, noun(r.Blobs, "blob"))}
	if r.WeightsFiles > 0 {
		out = append(out, fmt.Sprintf("%s %d %s of weights in the shared folder, %s", freed, r.WeightsFiles,
			noun(r.WeightsFiles, "file"), size(r.WeightsBytes)))
	}
	if r.Groups > 0 {
		out = append(out, fmt.Sprintf("closed from %s to %s", r.Oldest.UTC().Format(time.RFC3339),
			r.Newest.UTC().Format(time.RFC3339)))
	}
	for _, stream := range slices.Sorted(maps.Keys(r.Messages)) {
		if r.Messages[stream] > 0 {
			out = append(out, fmt.Sprintf("  %-18s %8d %-6s %12s", stream, r.Messages[stream],
				noun(int(r.Messages[stream]), "event"), size(r.Bytes[stream])))
		}
	}
	for _, why := range slices.Sorted(maps.Keys(r.Kept)) {
		out = append(out, fmt.Sprintf("  kept: %d %s, %s", r.Kept[why], noun(r.Kept[why], "group"),
			strings.TrimSpace(why)))
	}
	return out
}

// inStream is a run in a stream.
type inStream struct {
	stream string
	run    schemas.Run
}

// choose notes what a dry pass would free, to be counted with the rest of the chunk: at once where tooFull has to know.
func (p *pass) choose(ctx context.Context, of inStream, filters []string) error {
	if len(p.pressing) > 0 {
		return p.measureFreed(ctx, of, filters)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.chosen[of] = append(p.chosen[of], filters...)
	return nil
}

// countChosen counts what a dry pass has chosen.
func (p *pass) countChosen(ctx context.Context) error {
	for of, filters := range p.chosen {
		if err := p.measureFreed(ctx, of, filters); err != nil {
			return err
		}
	}
	clear(p.chosen)
	return nil
}

// measureFreed counts events of a run that a dry pass would free. It estimates the bytes by the run's own events: those
// of other runs may be far larger.
func (p *pass) measureFreed(ctx context.Context, of inStream, filters []string) error {
	n, err := p.b.Matching(ctx, of.stream, filters)
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.runs == nil {
		if p.runs, err = counters.Look(ctx, p.b, cmp.Or(p.cfg.Run, "*")); err != nil {
			return err
		}
	}
	mean, known := uint64(0), false
	if r := p.runs[of.run]; r != nil {
		mean, known = r.MeanSize(of.stream)
	}
	if !known {
		mean, known = p.means[of]
	}
	if !known && n > 0 {
		if mean, err = p.b.MeanSize(ctx, of.stream, of.run); err != nil {
			return err
		}
		p.means[of] = mean
	}
	p.add(of.stream, n, n*mean)
	return nil
}

// wouldGo reports whether a dry pass has chosen the group that an event is of.
func (p *pass) wouldGo(m *bus.Message) bool {
	a, _ := schemas.ParseSubject(m.Subject)
	return slices.Contains(blobStreams, m.Stream) && p.freedGroups[address{a.Run, a.UID}]
}
