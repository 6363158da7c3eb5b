package instrument

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/meander-rl/meander/pkg/bus"
)

const planeTimeout = 3 * time.Second

// ShowStreams registers metrics of the streams and of the queue of every durable consumer, until stop is called. They
// ask the server at each scrape. One program of a pipeline does this for all stages, so that the queue of a stage
// that no process serves is seen, too. A second call on the same registerer does nothing.
func ShowStreams(r prometheus.Registerer, b *bus.Bus) (stop func()) {
	if r == nil {
		return func() {}
	}
	label := func(subsystem, name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(prometheus.BuildFQName("meander", subsystem, name), help, labels, nil)
	}
	p := &streamCollector{
		bus:      b,
		up:       label("stream", "up", "1 when the server answered what the other metrics of streams and queues say"),
		messages: label("stream", "messages", "messages in a stream", "stream"),
		bytes:    label("stream", "bytes", "size of a stream in bytes", "stream"),
		used:     label("stream", "used_share", "share of the limit that a stream holds; a warning from 0.8", "stream"),
		limit: label("stream", "limit_bytes", "most bytes of a stream; not there for a stream without a limit",
			"stream"),
		// Readers choose the names of their durables, and each stream has names of its own.
		waiting: label("queue", "waiting_messages", "messages that a consumer has not yet been given", "stage",
			"durable", "stream"),
		inFlight: label("queue", "in_hand_messages", "messages that were given out and not confirmed", "stage",
			"durable", "stream"),
		again: label("queue", "redelivered_messages", "messages in flight that came more than once", "stage",
			"durable", "stream"),
	}
	if register(r, p) != p {
		return func() {} // the process shows them already
	}
	return func() { r.Unregister(p) }
}

type streamCollector struct {
	bus                        *bus.Bus
	up, messages, bytes, limit *prometheus.Desc
	used                       *prometheus.Desc
	waiting, inFlight, again   *prometheus.Desc
}

func (p *streamCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{p.up, p.messages, p.bytes, p.limit, p.used, p.waiting, p.inFlight, p.again} {
		ch <- d
	}
}

// Collect asks the server for the sizes of streams and queues; Prometheus calls it at each scrape. If the server does
// not answer, the metric up is 0 and the rest is absent.
func (p *streamCollector) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	if !p.bus.Conn().IsConnected() { // no answer would come in time
		gauge(p.up, 0)
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), planeTimeout)
	defer cancel()
	streams, err := p.bus.Stats(ctx)
	if err != nil {
		gauge(p.up, 0) // the rest of the scrape is still valid
		return
	}
	gauge(p.up, 1)
	for _, s := range streams {
		gauge(p.messages, float64(s.Messages), s.Name)
		gauge(p.bytes, float64(s.Bytes), s.Name)
		if s.MaxBytes > 0 {
			gauge(p.limit, float64(s.MaxBytes), s.Name)
			gauge(p.used, float64(s.Bytes)/float64(s.MaxBytes), s.Name)
		}
		for _, c := range s.Consumers {
			gauge(p.waiting, float64(c.Pending), c.Stage, c.Name, s.Name)
			gauge(p.inFlight, float64(c.AckPending), c.Stage, c.Name, s.Name)
			gauge(p.again, float64(c.Redelivered), c.Stage, c.Name, s.Name)
		}
	}
}
