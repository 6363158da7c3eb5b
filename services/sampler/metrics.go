package sampler

import (
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/instrument"
	"github.com/meander-rl/meander/services/sampler/engine"
	"github.com/meander-rl/meander/services/sampler/models"
)

// replied is the value of the metric's label state for an interaction that replied.
const replied = "replied"

// instruments are the metrics of the service. The samplers of one process share them.
type instruments struct {
	set                                      instrument.Set
	images                                   *prometheus.CounterVec
	steps, resumed, resumedSteps, superseded prometheus.Counter
	tokens                                   prometheus.Counter
	conversing                               prometheus.Gauge
	replies                                  *prometheus.CounterVec
	joining, denoising, places               prometheus.Gauge
	lost                                     prometheus.Counter
	updates                                  *prometheus.CounterVec
	version, resident                        prometheus.Gauge
	restarted                                prometheus.Counter
	load                                     prometheus.Observer
	rolls                                    rollInstruments
	step, fill                               prometheus.Observer
	encode, denoise, decode, publish, whole  prometheus.Observer
	// newest is the newest evaluation of the model; nil: there was none yet.
	newest atomic.Pointer[schemas.Evaluation]
}

// newInstruments registers those metrics of the sampler that its code counts; those that are read at each scrape have
// a function each below. All have the labels lane and model: a process has one of each. A run is no label, since their
// number has no bound.
func newInstruments(r prometheus.Registerer, lane schemas.Lane, model string) *instruments {
	if r != nil {
		r = prometheus.WrapRegistererWith(prometheus.Labels{"lane": string(lane), "model": model}, r)
	}
	s := instrument.New(r, "sampler")
	return &instruments{
		set: s,
		images: instrument.Zero(s.Counter("images_total", "trajectories stored, by stop reason", "stop_reason"),
			schemas.StopReasons...),
		steps:      s.Counter("steps_total", "denoising steps of samples").WithLabelValues(),
		tokens:     s.Counter("tokens_total", "tokens that language models generated").WithLabelValues(),
		conversing: s.Gauge("conversing_samples", "samples that wait for their interaction").WithLabelValues(),
		replies: instrument.Zero(s.Counter("interaction_replies_total",
			"answers of models that went to an interaction, by what came back", "state"), replied,
			schemas.ConversationTimeout, schemas.ConversationAbsent, schemas.ConversationError,
			schemas.ConversationGarbage),
		resumed: s.Counter("resumed_total",
			"samples that went on from a state that an earlier attempt had stored").WithLabelValues(),
		resumedSteps: s.Counter("resumed_steps_total",
			"denoising steps of earlier attempts that were not made again").WithLabelValues(),
		superseded: s.Counter("superseded_messages_total",
			"steps of attempts that a stored trajectory does not name, removed").WithLabelValues(),
		joining:   s.Gauge("joining_samples", "samples that wait for a place in a micro-batch").WithLabelValues(),
		denoising: s.Gauge("denoising_samples", "samples in micro-batches").WithLabelValues(),
		places: s.Gauge("batch_places",
			"samples that micro-batches have room for: batch times workers").WithLabelValues(),
		lost: s.Counter("devices_lost_total",
			"devices that compute no more until the process is started again").WithLabelValues(),
		updates: instrument.Zero(s.Counter("policy_updates_total",
			"versions of the weights that the lane was given, by what became of them here", "state"),
			schemas.AppliedStates...),
		version: s.Gauge("policy_version", "version of the weights that samples begin with").WithLabelValues(),
		resident: s.Gauge("policy_versions_resident",
			"versions of the weights in memory: one, and the last while samples end on it").WithLabelValues(),
		restarted: s.Counter("policy_restarts_total",
			"samples that began again for the sake of newer weights").WithLabelValues(),
		load: s.Seconds("policy_load_seconds",
			"time from the news of a version to the first sample that may begin with it").WithLabelValues(),
		rolls: newRollInstruments(s),
		step: s.Seconds("step_seconds",
			"time of one evaluation of the model, for a micro-batch").WithLabelValues(),
		fill: s.Ratio("batch_fill_ratio",
			"share of the places of a micro-batch that an evaluation of the model had samples for").WithLabelValues(),
		encode:  s.Seconds("encode_seconds", "time to encode the prompts of a sample").WithLabelValues(),
		denoise: s.Seconds("denoise_seconds", "time of a sample in micro-batches").WithLabelValues(),
		decode:  s.Seconds("decode_seconds", "time to decode the latents of a sample").WithLabelValues(),
		publish: s.Seconds("publish_seconds",
			"time from the last step of a sample to its stored trajectory, without decoding").WithLabelValues(),
		whole: s.Seconds("image_seconds",
			"time of a sample from its request to its stored trajectory").WithLabelValues(),
	}
}

// countEvaluation counts an evaluation of the model for a number of samples, which took a time.
func (i *instruments) countEvaluation(samples, places int, took time.Duration) {
	i.step.Observe(took.Seconds())
	i.fill.Observe(float64(samples) / float64(places))
	i.newest.Store(&schemas.Evaluation{
		Samples: int64(samples), Places: int64(places), TookNS: took.Nanoseconds(), At: time.Now().UnixNano(),
	})
}

// countTrajectory counts a stored trajectory and its times.
func (i *instruments) countTrajectory(t *schemas.Trajectory) {
	i.images.WithLabelValues(t.StopReason).Inc()
	if t.StopReason != schemas.StopCompleted {
		return
	}
	i.rolls.countRoll(t)
	whole := time.Since(time.Unix(0, t.Timings.Received))
	began := time.Since(time.Unix(0, t.Timings.Started))
	denoise, decode := time.Duration(t.Timings.DenoiseNS), time.Duration(t.Timings.DecodeNS)
	i.encode.Observe(time.Duration(t.Timings.EncodeNS).Seconds())
	i.denoise.Observe(denoise.Seconds())
	i.decode.Observe(decode.Seconds())
	i.publish.Observe((began - denoise - decode).Seconds())
	i.whole.Observe(whole.Seconds())
}

// registerDevices registers metrics of the devices, which are read at each scrape, until stop is called.
func (i *instruments) registerDevices(opened *models.Devices) (stop func()) {
	var stops []func()
	for _, p := range opened.All {
		if p.Device.Device == nil { // a server draws: there is no device here
			continue
		}
		stops = append(stops, i.set.GaugeOf("device_workers", "samplers of this process that compute on the device",
			func() float64 { return 1 }, prometheus.Labels{"device": p.ID, "name": p.Name()}))
		m, ok := p.Device.Device.(tensor.Metered)
		if !ok {
			continue
		}
		memory := func(state string, read func(tensor.Usage) int) {
			stops = append(stops, i.set.GaugeOf("device_memory_bytes",
				"memory of a GPU: used by weights and passes, idle until the next pass, free, total", func() float64 {
					return float64(read(m.Usage()))
				}, prometheus.Labels{"device": p.ID, "state": state}))
		}
		memory("used", func(u tensor.Usage) int { return u.Used })
		memory("idle", func(u tensor.Usage) int { return u.Idle })
		memory("free", func(u tensor.Usage) int { return u.Free })
		memory("total", func(u tensor.Usage) int { return u.Total })
		stops = append(stops,
			i.set.GaugeOf("device_memory_blocks",
				"pieces of a GPU's memory that are handed out; between passes those of weights", func() float64 {
					return float64(m.Usage().Blocks)
				}, prometheus.Labels{"device": p.ID}),
			i.set.CounterOf("device_busy_seconds_total", "time that a GPU had a pass", func() float64 {
				return m.Usage().Busy.Seconds()
			}, prometheus.Labels{"device": p.ID}))
	}
	return callAll(stops)
}

// registerServers registers how many servers draw the samples of a network, by whether they can be used, until stop is
// called. nil: there are none.
func (i *instruments) registerServers(of engine.Servers) (stop func()) {
	count := func() (used, all int) { return 0, 0 }
	if of != nil {
		count = func() (used, all int) { return of.Used(), of.Size() }
	}
	servers := func(state string, read func() int) func() {
		return i.set.GaugeOf("engine_servers", "servers of the engine, by whether they can be used: used or away",
			func() float64 { return float64(read()) }, prometheus.Labels{"state": state})
	}
	return callAll([]func(){
		servers("used", func() int { used, _ := count(); return used }),
		servers("away", func() int { used, all := count(); return all - used }),
	})
}

// registerPublisher registers metrics of the step events that are published and not yet stored, until stop.
func (i *instruments) registerPublisher(p *bus.Publisher, windowBytes int) (stop func()) {
	stops := []func(){
		i.set.CounterOf("publish_stall_seconds_total",
			"time that steps waited for room among those that are not yet stored", func() float64 {
				return p.Stats().Stalled.Seconds()
			}),
		i.set.GaugeOf("publish_pending_bytes", "step events that are not yet stored", func() float64 {
			return float64(p.Stats().PendingBytes)
		}),
		i.set.GaugeOf("publish_window_bytes", "most of step events that are not yet stored", func() float64 {
			return float64(windowBytes)
		}),
	}
	return callAll(stops)
}

// callAll returns a function that calls all of them.
func callAll(stops []func()) func() {
	return func() {
		for _, stop := range stops {
			stop()
		}
	}
}

// registerSpace registers metrics of the space in MDR_STEPS that this sampler's samples have and wait for, until stop
// is called.
func (i *instruments) registerSpace(r *bus.StepSpace) (stop func()) {
	stops := []func(){
		i.set.GaugeOf("room_held_bytes",
			"space in MDR_STEPS that samples in flight have reserved: the most that their steps take", func() float64 {
				return float64(r.Stats().Held)
			}),
		i.set.GaugeOf("room_waiting_samples", "samples that wait for space in MDR_STEPS", func() float64 {
			return float64(r.Stats().Waiting)
		}),
		i.set.CounterOf("room_wait_seconds_total", "time that samples waited for space in MDR_STEPS", func() float64 {
			return r.Stats().Waited.Seconds()
		}),
	}
	return func() {
		for _, stop := range stops {
			stop()
		}
	}
}
