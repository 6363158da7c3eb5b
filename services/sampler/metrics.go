package sampler

import (
	"strconv"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/instrument"
	"github.com/meander-rl/meander/services/sampler/engine"
	"github.com/meander-rl/meander/services/sampler/models"
	"github.com/meander-rl/meander/services/sampler/recorder"
	"github.com/meander-rl/meander/services/sampler/weights"
)

// replied is the state of an interaction that replied.
const replied = "replied"

// instruments are the metrics that code counts; show has those that are read at each scrape. Samplers of one process
// share them. A run is no label, since their number has no bound.
type instruments struct {
	set        instrument.Set
	Recorder   recorder.Metrics
	Weights    weights.Metrics
	Rolls      rollInstruments
	Images     *prometheus.CounterVec `metric:"images_total" labels:"stop_reason" help:"trajectories stored, by stop reason"`
	Superseded prometheus.Counter     `metric:"superseded_messages_total" help:"steps of attempts that a stored trajectory does not name, removed"`
	Conversing prometheus.Gauge       `metric:"conversing_samples" help:"samples that wait for their interaction"`
	Replies    *prometheus.CounterVec `metric:"interaction_replies_total" labels:"state" help:"answers of models that went to an interaction, by what came back"`
	Judging    prometheus.Gauge       `metric:"judged_samples" help:"samples in the middle that wait for their reward at a step"`
	Joining    prometheus.Gauge       `metric:"joining_samples" help:"samples that wait for a place in a micro-batch"`
	Denoising  prometheus.Gauge       `metric:"denoising_samples" help:"samples in micro-batches"`
	Places     prometheus.Gauge       `metric:"batch_places" help:"samples that micro-batches have room for: batch times workers"`
	Lost       prometheus.Counter     `metric:"devices_lost_total" help:"devices that compute no more until the process is started again"`
	Restarted  prometheus.Counter     `metric:"policy_restarts_total" help:"samples that began again for the sake of newer weights"`
	Step       prometheus.Observer    `metric:"step_seconds" help:"time of one evaluation of the model, for a micro-batch"`
	Fill       prometheus.Observer    `metric:"batch_fill_ratio" help:"share of the places of a micro-batch that an evaluation of the model had samples for"`
	Rows       *prometheus.CounterVec `metric:"batch_rows_total" labels:"versions" help:"samples of evaluations of the model, by how many versions of the weights were in the call"`
	Encode     prometheus.Observer    `metric:"encode_seconds" help:"time to encode the prompts of a sample"`
	Denoise    prometheus.Observer    `metric:"denoise_seconds" help:"time of a sample in micro-batches"`
	Decode     prometheus.Observer    `metric:"decode_seconds" help:"time to decode the latents of a sample"`
	Publish    prometheus.Observer    `metric:"publish_seconds" help:"time from the last step of a sample to its stored trajectory, without decoding"`
	Whole      prometheus.Observer    `metric:"image_seconds" help:"time of a sample from its request to its stored trajectory"`
	// newest is the newest evaluation of the model; nil: there was none yet.
	newest atomic.Pointer[schemas.Evaluation]
}

// newInstruments registers the metrics of a lane and its model with r; nil: nowhere.
func newInstruments(r prometheus.Registerer, lane schemas.Lane, model string) *instruments {
	if r != nil {
		r = prometheus.WrapRegistererWith(prometheus.Labels{"lane": string(lane), "model": model}, r)
	}
	i := &instruments{set: instrument.New(r, "sampler")}
	i.set.Fill(i)
	instrument.Zero(i.Images, schemas.StopReasons...)
	instrument.Zero(i.Replies, replied, schemas.ConversationTimeout, schemas.ConversationAbsent,
		schemas.ConversationError, schemas.ConversationGarbage)
	instrument.Zero(i.Weights.Updates, schemas.AppliedStates...)
	instrument.Zero(i.Rolls.Samples, append([]string{outcomeRolled}, schemas.RollReasons...)...)
	instrument.Zero(i.Rolls.Terms, termExposure, termFC, termADR)
	return i
}

// countEvaluation counts an evaluation of the model for a batch, when it has ended, well or not.
func (i *instruments) countEvaluation(batch []*attempt, places int, took time.Duration) {
	samples, versions := len(batch), map[engine.Engine]bool{}
	for _, a := range batch {
		versions[a.engine] = true
	}
	i.Rows.WithLabelValues(strconv.Itoa(len(versions))).Add(float64(samples))
	i.Step.Observe(took.Seconds())
	i.Fill.Observe(float64(samples) / float64(places))
	i.newest.Store(&schemas.Evaluation{
		Samples: int64(samples), Places: int64(places), TookNS: took.Nanoseconds(), At: time.Now().UnixNano(),
	})
}

// countTrajectory counts a stored trajectory and its times.
func (i *instruments) countTrajectory(t *schemas.Trajectory) {
	i.Images.WithLabelValues(t.StopReason).Inc()
	if t.StopReason != schemas.StopCompleted {
		return
	}
	i.Rolls.countRoll(t)
	whole := time.Since(time.Unix(0, t.Timings.Received))
	began := time.Since(time.Unix(0, t.Timings.Started))
	denoise, decode := time.Duration(t.Timings.DenoiseNS), time.Duration(t.Timings.DecodeNS)
	i.Encode.Observe(time.Duration(t.Timings.EncodeNS).Seconds())
	i.Denoise.Observe(denoise.Seconds())
	i.Decode.Observe(decode.Seconds())
	i.Publish.Observe((began - denoise - decode).Seconds())
	i.Whole.Observe(whole.Seconds())
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
			gauge("device_memory_bytes",
				"memory of a GPU: used by weights and passes, idle until the next pass, free, total",
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
