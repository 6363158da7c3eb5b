package instrument

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/micro"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// Deliveries counts the messages of one stream: received, retried, and refused as dead letters.
type Deliveries struct {
	stream        string
	first, again  prometheus.Counter
	retries, dead *prometheus.CounterVec
}

// Deliveries makes the counters of a stream that the service consumes: deliveries, retries and dead letters. Values
// of labels that are known exist from the start, at 0.
func (s Set) Deliveries(stream string) Deliveries {
	came := s.Counter("deliveries_total", "messages received, by stream and delivery: first or again", "stream",
		"delivery")
	d := Deliveries{
		stream: stream, first: came.WithLabelValues(stream, "first"), again: came.WithLabelValues(stream, "again"),
		retries: s.Counter("retries_total",
			"tries that failed and are repeated, by stream and reason: full (the next stream has no room) or error",
			"stream", "reason"),
		dead: s.Counter("dead_total", "messages refused or given up, by stream and code of their dead letter",
			"stream", "code"),
	}
	for _, reason := range []string{retryError, retryFull} {
		d.retries.WithLabelValues(stream, reason)
	}
	for _, code := range schemas.DeadCodes {
		d.dead.WithLabelValues(stream, code)
	}
	return d
}

// Received counts a message that was received: first deliveries apart from later ones.
func (d Deliveries) Received(m *bus.Message) {
	if m.Delivered > 1 {
		d.again.Inc()
	} else {
		d.first.Inc()
	}
}

// Retried counts a handler's failure after which the message comes again.
func (d Deliveries) Retried(err error) {
	reason := retryError
	if errors.Is(err, bus.ErrStreamFull) {
		reason = retryFull
	}
	d.retries.WithLabelValues(d.stream, reason).Inc()
}

// Reasons of a retry.
const (
	retryError = "error"
	retryFull  = "full"
)

// Dead counts a dead letter by its code.
func (d Deliveries) Dead(code string) { d.dead.WithLabelValues(d.stream, code).Inc() }

// Count wraps a consumer and its handler so that deliveries, retries and dead letters are counted. The handler's
// errors go on to the bus unchanged.
func (s Set) Count(c bus.ConsumerConfig, h bus.Handler) (bus.ConsumerConfig, bus.Handler) {
	d := s.Deliveries(c.Stream)
	subjects := c.Filters
	if spec, ok := schemas.StreamNamed(c.Stream); ok && len(subjects) == 0 {
		subjects = spec.Subjects
	}
	work := s.Work(strings.ToLower(strings.TrimPrefix(c.Stream, "MDR_")), strings.Join(subjects, " "), c.Name)
	giveUp := c.OnGiveUp
	c.OnGiveUp = func(ctx context.Context, m *bus.Message, cause error) error {
		if giveUp != nil {
			if err := giveUp(ctx, m, cause); err != nil {
				return err
			}
		}
		d.Dead(bus.Code(cause))
		return nil
	}
	var held sync.Map // messages whose handler runs again for the same delivery
	return c, func(ctx context.Context, m *bus.Message) error {
		if _, again := held.LoadAndDelete(m); !again {
			d.Received(m)
		}
		began := time.Now()
		err := h(ctx, m)
		if !errors.Is(err, bus.ErrStreamFull) { // it runs again
			work.Done(ctx, began, err)
		}
		terminal, _ := errors.AsType[*bus.TerminalError](err)
		switch {
		case m.Acknowledged():
		case terminal != nil && terminal.Garbage: // the bus gives it up without OnGiveUp
			d.Dead(terminal.Code)
		case err != nil && terminal == nil && ctx.Err() == nil:
			d.Retried(err)
			if errors.Is(err, bus.ErrStreamFull) {
				held.Store(m, nil)
			}
		}
		return err
	}
}

// Work counts what the copies of a service in this process have handled of one kind, as service discovery shows it.
type Work struct {
	mu    sync.Mutex
	stats micro.EndpointStats
}

var works struct {
	sync.Mutex
	of map[string]map[string]*Work
}

// Work returns the counts of a kind of work of the service: of a subject, or of a stream's durable consumer, the queue.
func (s Set) Work(name, subject, queue string) *Work {
	works.Lock()
	defer works.Unlock()
	if works.of == nil {
		works.of = map[string]map[string]*Work{}
	}
	if works.of[s.service] == nil {
		works.of[s.service] = map[string]*Work{}
	}
	w := works.of[s.service][name]
	if w == nil {
		w = &Work{stats: micro.EndpointStats{Name: name, Subject: subject, QueueGroup: queue}}
		works.of[s.service][name] = w
	}
	return w
}

// Done counts what began at a time and has ended, with an error or nil. What a stop of the service ended is not
// counted.
func (w *Work) Done(ctx context.Context, began time.Time, err error) {
	if err != nil && ctx.Err() != nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.stats.NumRequests++
	w.stats.ProcessingTime += time.Since(began)
	if err != nil {
		w.stats.NumErrors++
		w.stats.LastError = err.Error()
	}
}

// WorkOf returns the counts of a service, by name.
func WorkOf(service string) (all []*micro.EndpointStats) {
	works.Lock()
	defer works.Unlock()
	for _, w := range works.of[service] {
		w.mu.Lock()
		stats := w.stats
		w.mu.Unlock()
		stats.AverageProcessingTime = stats.ProcessingTime / time.Duration(max(1, stats.NumRequests))
		all = append(all, &stats)
	}
	slices.SortFunc(all, func(a, b *micro.EndpointStats) int { return cmp.Compare(a.Name, b.Name) })
	return all
}
