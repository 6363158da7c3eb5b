// Package instrument makes the counters and gauges of a service for Prometheus. Several
// services of one process, and several copies of one service, share them.
package instrument

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"
)

// Set makes the instruments of one service, named meander_<service>_<name>.
type Set struct {
	registry prometheus.Registerer
	service  string
}

// New makes a set on a registry; on nil the instruments count and are not shown.
func New(r prometheus.Registerer, service string) Set {
	if r == nil {
		r = prometheus.NewRegistry()
	}
	return Set{r, service}
}

// Counter has one value for each combination of labels.
func (s Set) Counter(name, help string, labels ...string) *prometheus.CounterVec {
	return register(s.registry, prometheus.NewCounterVec(prometheus.CounterOpts{
		Namespace: "meander", Subsystem: s.service, Name: name, Help: help,
	}, labels))
}

// Gauge has one value for each combination of labels.
func (s Set) Gauge(name, help string, labels ...string) *prometheus.GaugeVec {
	return register(s.registry, prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Namespace: "meander", Subsystem: s.service, Name: name, Help: help,
	}, labels))
}

// Seconds is a histogram of times from half a millisecond to half a minute.
func (s Set) Seconds(name, help string, labels ...string) *prometheus.HistogramVec {
	return register(s.registry, prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Namespace: "meander", Subsystem: s.service, Name: name, Help: help, Buckets: prometheus.ExponentialBuckets(0.0005, 2, 16),
	}, labels))
}

// register returns what is registered under the name already, or c.
func register[C prometheus.Collector](r prometheus.Registerer, c C) C {
	err := r.Register(c)
	if err == nil {
		return c
	}
	if have, ok := errors.AsType[prometheus.AlreadyRegisteredError](err); ok {
		if same, ok := have.ExistingCollector.(C); ok {
			return same
		}
	}
	panic(err) // one name, two meanings: a mistake in the services
}
