package reward

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/pkg/scorer/natsscore"
	"github.com/meander-rl/meander/pkg/scorer/scorerfile"
)

// catalog is every reward function of the service, each in its lane.
type catalog struct {
	cfg     Config
	nc      *nats.Conn
	metrics *instruments
	// local has a token for each picture that is scored in this process.
	local chan struct{}

	mu    sync.Mutex
	lanes map[string]*lane
	// missing are functions that this package has and this machine does not.
	missing map[string]error
}

// openCatalog opens what needs no configuration, what the file configures, and what the
// service must have.
func openCatalog(cfg Config, nc *nats.Conn, metrics *instruments, log zerolog.Logger) (*catalog, error) {
	c := &catalog{
		cfg: cfg, nc: nc, metrics: metrics, local: make(chan struct{}, cfg.Workers), lanes: map[string]*lane{}, missing: map[string]error{},
	}
	for _, name := range scorer.Names() {
		if scorer.NewGroup(name) != nil {
			continue // it has no call of its own
		}
		s, err := scorer.New(name)
		switch {
		case errors.Is(err, scorer.ErrNoTesseract):
			c.missing[name] = err
			log.Info().Str("scorer", name).Msg(err.Error())
		case err != nil:
			return nil, fmt.Errorf("reward function %q: %w", name, err)
		default:
			c.add(s, nil)
		}
	}
	if cfg.Scorers != "" {
		file, err := scorerfile.Load(cfg.Scorers)
		if err != nil {
			return nil, fmt.Errorf("scorers: %w", err)
		}
		opened, err := file.Open(nc)
		if err != nil {
			return nil, fmt.Errorf("scorers: %q: %w", cfg.Scorers, err)
		}
		for _, s := range opened {
			c.add(s, c.ownCalls(s))
		}
	}
	if err := c.check(cfg.Require); err != nil {
		c.close()
		return nil, fmt.Errorf("require: %w", err)
	}
	return c, nil
}

// defaultConcurrency is how many calls of a remote function are under way at once, where
// it does not say.
const defaultConcurrency = 4

// ownCalls are the calls of a remote function.
func (c *catalog) ownCalls(s scorer.Scorer) chan struct{} {
	n := defaultConcurrency
	if k, ok := s.(interface{ Concurrency() int }); ok {
		n = k.Concurrency()
	}
	return make(chan struct{}, n)
}

// add opens a lane; without calls of its own the function runs in this process.
func (c *catalog) add(s scorer.Scorer, calls chan struct{}) *lane {
	l := &lane{scorer: s, calls: calls, timeout: c.cfg.ScoreTimeout, metrics: c.metrics}
	if calls == nil {
		l.calls = c.local
	} else {
		// At most a quarter of what is in hand may wait for one function.
		batch := 1
		if b, ok := s.(scorer.BatchScorer); ok {
			batch = b.MaxBatch()
		}
		l.line = make(chan struct{}, max(2, min(2*cap(calls)*batch, c.cfg.Slots/4)))
	}
	if b, ok := s.(scorer.BatchScorer); ok && b.MaxBatch() > 1 {
		l.batches = newBatcher(l, b)
	}
	c.lanes[s.Name()] = l
	return l
}

// lane finds a function by its name. Workers on NATS need no configuration: any name of
// theirs has a lane.
func (c *catalog) lane(name string) (*lane, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if l, ok := c.lanes[name]; ok {
		return l, nil
	}
	if err, ok := c.missing[name]; ok {
		return nil, err
	}
	kind, instance, err := scorer.SplitName(name)
	switch {
	case err != nil:
		return nil, err
	case kind == scorer.NATS && c.nc != nil:
		if len(c.lanes) >= maxLanes {
			return nil, fmt.Errorf("reward function %q: %d are in use, the most there may be", name, maxLanes)
		}
		s, err := natsscore.New(c.nc, instance, natsscore.DefaultConfig())
		if err != nil {
			return nil, err
		}
		return c.add(s, c.ownCalls(s)), nil
	}
	return nil, fmt.Errorf("reward function %q is not configured here; add it to the file of the setting scorers (have %q)", name, c.names())
}

// maxLanes bounds the functions that prompts may name into being.
const maxLanes = 256

// check says which of the names this service cannot serve, and why.
func (c *catalog) check(names []string) error {
	var errs []error
	for _, name := range names {
		kind, _, err := scorer.SplitName(name)
		if err == nil && kind != scorer.External && scorer.NewGroup(name) == nil {
			_, err = c.lane(name)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func (c *catalog) names() []string {
	var out []string
	for name := range c.lanes {
		out = append(out, name)
	}
	slices.Sort(out)
	return out
}

// versions are for the log.
func (c *catalog) versions() map[string]string {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := map[string]string{}
	for name, l := range c.lanes {
		out[name] = l.scorer.Version()
	}
	return out
}

func (c *catalog) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, l := range c.lanes {
		if l.batches != nil {
			l.batches.close()
		}
		if closer, ok := l.scorer.(io.Closer); ok {
			_ = closer.Close() // it only frees what the process frees next
		}
	}
}

// CheckNames says which reward functions a service of this configuration cannot serve,
// and what to install or configure.
func CheckNames(cfg Config, names []string) error {
	if err := cfg.Validate(); err != nil {
		return fmt.Errorf("reward config: %w", err)
	}
	c, err := openCatalog(cfg, nil, newInstruments(nil), zerolog.Nop())
	if err != nil {
		return err
	}
	defer c.close()
	c.nc = &nats.Conn{} // any worker may come
	return c.check(names)
}
