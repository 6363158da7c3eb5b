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

// replied is the state of an interaction that replied.
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

// newInstruments registers the metrics that code counts; those that are read at each scrape have a function each below.
// A run is no label, since their number has no bound.
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

// show registers metrics that are read at each scrape, until stop is called: of the devices, of the servers that draw
// (nil: there are none), of the steps that are published and not yet stored, and of the space in MDR_STEPS.
func (i *instruments) show(opened *models.Devices, servers engine.Servers, p *bus.Publisher, window int,
	space *bus.StepSpace,
) (stop func()) {
	var stops []func()
	gauge := func(name, help string, read func() float64, labels prometheus.Labels) {
		stops = append(stops, i.set.GaugeOf(name, help, read, labels))
	}
	counter := func(name, help string, read func() float64, labels prometheus.Labels) {
		stops = append(stops, i.set.CounterOf(name, help, read, labels))
	}
	for _, d := range opened.All {
		if d.Device.Device == nil { // a server draws: there is no device here
			continue
		}
		gauge("device_workers", "samplers of this process that compute on the device",
			func() float64 { return 1 }, prometheus.Labels{"device": d.ID, "name": d.Name()})
		m, ok := d.Device.Device.(tensor.Metered)
		if !ok {
			continue
		}
		for state, read := range map[string]func(tensor.Usage) int{
			"used": func(u tensor.Usage) int { return u.Used }, "idle": func(u tensor.Usage) int { return u.Idle },
			"free": func(u tensor.Usage) int { return u.Free }, "total": func(u tensor.Usage) int { return u.Total },
		} {
			gauge("device_memory_bytes", "memory of a GPU: used by weights and passes, idle until the next pass, free, total",
				func() float64 { return float64(read(m.Usage())) }, prometheus.Labels{"device": d.ID, "state": state})
		}
		gauge("device_memory_blocks", "pieces of a GPU's memory that are handed out; between passes those of weights",
			func() float64 { return float64(m.Usage().Blocks) }, prometheus.Labels{"device": d.ID})
		counter("device_busy_seconds_total", "time that a GPU had a pass",
			func() float64 { return m.Usage().Busy.Seconds() }, prometheus.Labels{"device": d.ID})
	}
	used, away := func() float64 { return 0 }, func() float64 { return 0 }
	if servers != nil {
		used = func() float64 { return float64(servers.Used()) }
		away = func() float64 { return float64(servers.Size() - servers.Used()) }
	}
	for state, read := range map[string]func() float64{"used": used, "away": away} {
		gauge("engine_servers", "servers of the engine, by whether they can be used: used or away", read,
			prometheus.Labels{"state": state})
	}
	counter("publish_stall_seconds_total", "time that steps waited for room among those that are not yet stored",
		func() float64 { return p.Stats().Stalled.Seconds() }, nil)
	gauge("publish_pending_bytes", "step events that are not yet stored",
		func() float64 { return float64(p.Stats().PendingBytes) }, nil)
	gauge("publish_window_bytes", "most of step events that are not yet stored",
		func() float64 { return float64(window) }, nil)
	gauge("room_held_bytes", "space in MDR_STEPS that samples in flight have reserved: the most that their steps take",
		func() float64 { return float64(space.Stats().Held) }, nil)
	gauge("room_waiting_samples", "samples that wait for space in MDR_STEPS",
		func() float64 { return float64(space.Stats().Waiting) }, nil)
	counter("room_wait_seconds_total", "time that samples waited for space in MDR_STEPS",
		func() float64 { return space.Stats().Waited.Seconds() }, nil)
	return func() {
		for _, stop := range stops {
			stop()
		}
	}
}
