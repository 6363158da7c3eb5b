package sampler

import (
	"context"
	"crypto/rand"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
	"github.com/meander-rl/meander/services/sampler/models"
	"github.com/meander-rl/meander/services/sampler/recorder"
	"github.com/meander-rl/meander/services/sampler/weights"
)

type service struct {
	cfg     Config
	bus     *bus.Bus
	devices *models.Devices
	workers []*worker // one for each device
	// network is the checkpoint, without the changes of policies.
	network   engine.Network
	versions  *weights.Versions
	recorders *recorder.Store
	metrics   *instruments
	ended     chan error // gets the error of the last device that was lost
	controls  *controls
	space     *bus.StepSpace
	making    *making
	// stopping reports whether the process is to end; onStop calls f when it is.
	stopping func() bool
	onStop   func(f func()) (cancel func() bool)
	// loading is a lock: held while the states that a group starts with are in memory.
	loading chan struct{}
	// otherBase notes the requests that wait for a sampler of another checkpoint.
	otherBase otherBase
	mixing    sync.Once // until it is logged that the sampler finishes what another engine has begun
	// token and count name attempts: events of two never share a subject.
	token string
	count atomic.Uint64
}

// worker is a device and its queue. One or more schedulers run the attempts of the queue.
type worker struct {
	id    string
	index int              // of the device: in weights.Loaded.Engines
	can   engine.Abilities // of the checkpoint on it
	queue *queue
	load  atomic.Int64 // attempts that were given to it
	lost  atomic.Bool  // its device computes no more
}

// attempt is one try at one sample. While it is queued or active the scheduler owns it, else the handler.
type attempt struct {
	service  *service
	worker   *worker
	req      *schemas.Request
	recorder *recorder.Recorder
	// weights are those that make the next step.
	weights *weights.Loaded
	// expired returns an error once the handler has given the request up: the attempt ends at the next boundary.
	expired  func() error
	engine   engine.Engine
	episode  engine.Episode
	priority int64
	// onAdmitted is called once, before the first step; nil: nothing is called.
	onAdmitted func()
	// recordStep gets each event as it is completed; device is this attempt's share of the device's time for it.
	recordStep func(step schemas.StepEvent, device time.Duration) error
	// betweenSteps is called between two Steps, after the events are recorded; nil: nothing is called.
	betweenSteps func() error

	// judged are the steps at which it leaves the scheduler, to be judged by its prediction, ascending.
	judged []int64

	tick     uint64        // of the last batch that it was in
	device   time.Duration // since the last step
	started  time.Time     // when it was first admitted
	joined   time.Time     // when it was last admitted
	denoised time.Duration // time in micro-batches

	finished bool
	err      error
	done     chan struct{} // closed when it has left the scheduler
}

// openAnnounced is openModel; while a server is waited for, presence says so, for those who ask for its lane.
func (c Config) openAnnounced(ctx context.Context, b *bus.Bus, log zerolog.Logger) (*models.Devices, error) {
	if c.Engine == "" || models.IsTorch(c.Engine) {
		return c.openModel(ctx, log)
	}
	if c.Lane == "" {
		c.Lane = schemas.Lane(model.NameOf(c.Model))
	}
	var mu sync.Mutex
	var end func() error // of the announcement; nil: there is none
	why, over := "", false
	changed, told, instance := make(chan struct{}, 1), c.Waiting, "starting-"+strings.ToLower(rand.Text()[:8])
	presence := func() *schemas.Presence {
		mu.Lock()
		defer mu.Unlock()
		return &schemas.Presence{Service: schemas.ServiceStarting, Instance: instance, Lane: c.Lane, Waiting: why}
	}
	c.Waiting = func(text string) {
		switch {
		case told != nil:
			told(text)
		case text != "":
			log.Warn().Msg(text)
		}
		mu.Lock()
		defer mu.Unlock()
		if over || text == "" {
			return
		}
		if why = text; end == nil {
			end = b.Announcing(ctx, presence, changed)
			return
		}
		select {
		case changed <- struct{}{}:
		default:
		}
	}
	defer func() {
		mu.Lock()
		over = true
		mu.Unlock()
		if end == nil {
			return
		}
		if err := end(); err != nil {
			log.Error().Err(err).Msg("what the sampler waits for is not announced")
		}
	}()
	return c.openModel(ctx, log)
}
