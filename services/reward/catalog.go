package reward

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/pkg/scorer/natsscore"
	"github.com/meander-rl/meander/pkg/scorer/scorerfile"
	"github.com/meander-rl/meander/schemas"
)

// catalog holds every reward function of the service with its pool.
type catalog struct {
	cfg      Config
	nc       *nats.Conn
	metrics  *instruments
	stopping <-chan struct{}

	mu      sync.Mutex
	entries map[string]entry
	// groups are the functions that rate whole groups, each with a pool of its own: a call of it is one group.
	groups map[string]groupEntry
	// missing are functions that the program knows but this machine cannot run, with the reason.
	missing map[string]error
}

// entry is a function and its pool; those that compute in this process share one.
type entry struct {
	scorer scorer.Scorer
	pool   *pool
}

// groupEntry is a function that rates whole groups, and its pool.
type groupEntry struct {
	rater scorer.GroupScorer
	pool  *pool
}

// maxPools bounds the functions that prompts may add by naming them.
const maxPools = 256

// openCatalog opens the functions that need no configuration and those of the scorers file. It fails if the file is not
// valid or a required function is missing. nc is for workers on NATS; it may be nil if no function will be called.
func openCatalog(cfg Config, nc *nats.Conn, metrics *instruments, stopping <-chan struct{},
	log zerolog.Logger,
) (*catalog, error) {
	c := &catalog{
		cfg: cfg, nc: nc, metrics: metrics, stopping: stopping, entries: map[string]entry{},
		groups: map[string]groupEntry{}, missing: map[string]error{},
	}
	if err := c.open(log); err != nil {
		c.close()
		return nil, err
	}
	return c, nil
}

// open fills the catalog; openCatalog calls it. Without tesseract the function ocr is missing, which is no error
// unless it is required.
func (c *catalog) open(log zerolog.Logger) error {
	local := (&pool{name: "local", calls: c.cfg.Workers, batch: 1, timeout: c.cfg.ScoreTimeout, metrics: c.metrics}).
		start(c.stopping)
	for _, name := range scorer.Names() {
		if name == scorer.OCR || scorer.NewGroup(name) != nil {
			continue
		}
		s, err := scorer.New(name)
		if err != nil {
			return fmt.Errorf("reward function %q: %w", name, err)
		}
		c.entries[name] = entry{s, local}
	}
	workers := ocrWorkers(c.cfg)
	switch ocr, err := scorer.NewOCR(scorer.OCRConfig{
		Workers: workers, Timeout: min(c.cfg.ScoreTimeout, ocrTimeout),
	}); {
	case errors.Is(err, scorer.ErrNoTesseract):
		c.missing[scorer.OCR] = err
		log.Info().Str("scorer", scorer.OCR).Msg(err.Error())
	case err != nil:
		return fmt.Errorf("reward function %q: %w", scorer.OCR, err)
	default:
		c.add(ocr, workers)
	}
	if c.cfg.Scorers != "" {
		file, err := scorerfile.Load(c.cfg.Scorers)
		if err != nil {
			return err
		}
		opened, err := file.Open(c.nc)
		if err != nil {
			return fmt.Errorf("scorers file %q: %w", c.cfg.Scorers, err)
		}
		for _, s := range opened {
			c.add(s, 1)
		}
	}
	if err := c.check(c.cfg.Require); err != nil {
		return fmt.Errorf("require: %w", err)
	}
	return nil
}

// add adds a function with a pool of its own, and returns both. The pool makes as many calls at once as the function
// says, or otherwise the given number. The caller holds the lock, or is the only user.
func (c *catalog) add(s scorer.Scorer, calls int) entry {
	e := entry{s, c.newPool(s, calls)}
	c.entries[s.Name()] = e
	return e
}

// newPool returns the pool of a function; see add.
func (c *catalog) newPool(s interface{ Name() string }, calls int) *pool {
	if k, ok := s.(interface{ Concurrency() int }); ok {
		calls = k.Concurrency()
	}
	l := &pool{name: s.Name(), calls: calls, batch: 1, timeout: c.cfg.ScoreTimeout, metrics: c.metrics}
	if b, ok := s.(scorer.BatchScorer); ok && b.MaxBatch() > 1 {
		l.batch, l.linger = b.MaxBatch(), c.cfg.Linger
	}
	l.queueLimit = min(max(minQueue, 2*l.calls*l.batch), max(maxQueue, l.batch))
	return l.start(c.stopping)
}

// findGroup is find for a function that rates whole groups.
func (c *catalog) findGroup(name string) (groupEntry, error) {
	s := scorer.NewGroup(name)
	if s == nil {
		e, err := c.find(name)
		if err != nil {
			return groupEntry{}, err
		}
		var ok bool
		if s, ok = e.scorer.(scorer.GroupScorer); !ok {
			return groupEntry{}, fmt.Errorf("%s rates samples one by one", name)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	e, ok := c.groups[name]
	if !ok {
		e.rater = s
		if scorer.NewGroup(name) == nil {
			e.pool = c.newPool(&groupCall{GroupScorer: s}, 1)
		} else { // it computes here: one group at a time
			e.pool = (&pool{name: name, calls: 1, batch: 1, timeout: c.cfg.GroupWait, metrics: c.metrics}).
				start(c.stopping)
		}
		c.groups[name] = e
	}
	return e, nil
}

// minQueue and maxQueue bound the queue of one function: enough samples to keep it busy until others come again.
const (
	minQueue = 16
	maxQueue = 256
)

// find returns a function with its pool by its name. It adds nats:NAME on first use, as workers on NATS need no
// configuration. The error says why the function cannot be used here; the score is then a failed one.
func (c *catalog) find(name string) (entry, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if e, ok := c.entries[name]; ok {
		return e, nil
	}
	if err, ok := c.missing[name]; ok {
		return entry{}, err
	}
	kind, instance, err := scorer.SplitName(name)
	switch {
	case err != nil:
		return entry{}, err
	case kind != scorer.NATS:
		return entry{}, fmt.Errorf("reward function %q is not configured here; add it to the scorers file (there "+
			"are %s)",
			name, strings.Join(c.names(), ", "))
	case len(c.entries) >= maxPools:
		return entry{}, fmt.Errorf("reward function %q: there are %d already, the most that one service has", name,
			maxPools)
	}
	s, err := natsscore.New(c.nc, instance, natsscore.DefaultConfig())
	if err != nil {
		return entry{}, err
	}
	return c.add(s, 1), nil
}

// check returns an error for each name that this service cannot serve, with the reason, joined; nil if it serves all.
func (c *catalog) check(names []string) error {
	var errs []error
	for _, name := range names {
		kind, _, err := scorer.SplitName(name)
		if err == nil && kind != scorer.External && scorer.NewGroup(name) == nil {
			_, err = c.find(name)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func (c *catalog) names() []string { return slices.Sorted(maps.Keys(c.entries)) }

// presence returns what this service announces to others: its reward functions, those that are missing, with the
// reason, and why those that others run do not answer.
func (c *catalog) presence(instance string) *schemas.Presence {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := &schemas.Presence{Service: schemas.ServiceReward, Instance: instance, Reward: c.names()}
	for _, name := range scorer.Names() {
		if scorer.NewGroup(name) != nil {
			p.Reward = append(p.Reward, name)
		}
	}
	slices.Sort(p.Reward)
	for _, name := range slices.Sorted(maps.Keys(c.missing)) {
		p.Missing = append(p.Missing, schemas.MissingReward{Name: name, Reason: c.missing[name].Error()})
	}
	away := map[string]bool{}
	for _, e := range c.entries {
		away[e.pool.away()] = true
	}
	for _, e := range c.groups {
		away[e.pool.away()] = true
	}
	delete(away, "")
	p.Waiting = strings.Join(slices.Sorted(maps.Keys(away)), "; ")
	return p
}

// versions returns the version of each function by name, for the log.
func (c *catalog) versions() map[string]string {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := map[string]string{}
	for name, e := range c.entries {
		out[name] = e.scorer.Version()
	}
	return out
}

// slots returns how many samples may be in flight at once: as many as all queues and calls hold, and some more. Samples
// that find a queue full then do not keep out samples of other functions.
func (c *catalog) slots() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := spareSlots
	for _, e := range c.entries {
		if e.pool.queueLimit > 0 {
			n += e.pool.queueLimit + e.pool.calls*e.pool.batch
		}
	}
	return n
}

// spareSlots are for functions that compute in this process, for samples that need none, and for pools that find adds.
const spareSlots = 256

// close ends all calls and closes the functions that hold connections, when the service ends.
func (c *catalog) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, g := range c.groups {
		g.pool.close()
	}
	for _, e := range c.entries {
		e.pool.close()
		if closer, ok := e.scorer.(io.Closer); ok {
			_ = closer.Close() // closes idle connections, which end with the process anyway
		}
	}
}

// CheckNames returns an error for each name of a reward function that a service with these settings cannot serve,
// joined, with what to install or configure for it. Commands call it before they publish.
func CheckNames(cfg Config, names []string) error {
	if err := cfg.Validate(); err != nil {
		return fmt.Errorf("reward config: %w", err)
	}
	c, err := openCatalog(cfg, nil, newInstruments(nil), nil, zerolog.Nop())
	if err != nil {
		return err
	}
	defer c.close()
	return c.check(names)
}
