// Package instrument makes the counters, gauges and histograms of a service for
// Prometheus. Several services of one process, and several copies of one service, share
// them.
//
// A name is meander_<service>_<what>_<unit>: counters end in _total, histograms in
// _seconds or _ratio, everything else is a gauge.
package instrument

import (
	"errors"
	"maps"

	"github.com/prometheus/client_golang/prometheus"
)

// Set makes the instruments of one service.
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

// Counter has one value for each combination of labels. Those that are known beforehand
// are to be made at the start (Zero): a rate cannot be told from a first value.
func (s Set) Counter(name, help string, labels ...string) *prometheus.CounterVec {
	return register(s.registry, prometheus.NewCounterVec(prometheus.CounterOpts{
		Namespace: "meander", Subsystem: s.service, Name: name, Help: help,
	}, labels))
}

// Zero makes the values of a counter with one label.
func Zero(c *prometheus.CounterVec, values ...string) *prometheus.CounterVec {
	for _, v := range values {
		c.WithLabelValues(v)
	}
	return c
}

// Gauge has one value for each combination of labels. Copies of a service add up in it:
// Add and Sub, not Set.
func (s Set) Gauge(name, help string, labels ...string) *prometheus.GaugeVec {
	return register(s.registry, prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Namespace: "meander", Subsystem: s.service, Name: name, Help: help,
	}, labels))
}

// Seconds is a histogram of times from half a millisecond to half a minute.
func (s Set) Seconds(name, help string, labels ...string) *prometheus.HistogramVec {
	return s.histogram(name, help, prometheus.ExponentialBuckets(0.0005, 2, 16), labels)
}

// Ratio is a histogram of shares from 0 to 1, in eighths.
func (s Set) Ratio(name, help string, labels ...string) *prometheus.HistogramVec {
	return s.histogram(name, help, prometheus.LinearBuckets(0.125, 0.125, 8), labels)
}

func (s Set) histogram(name, help string, buckets []float64, labels []string) *prometheus.HistogramVec {
	return register(s.registry, prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Namespace: "meander", Subsystem: s.service, Name: name, Help: help, Buckets: buckets,
	}, labels))
}

// CounterOf is a counter that others keep, with the labels that it has for ever: read is asked
// when somebody looks, and must be quick and never fall. After stop the last value stays.
func (s Set) CounterOf(name, help string, read func() float64, labels ...prometheus.Labels) (stop func()) {
	return s.sum(name, help, prometheus.CounterValue, labels).add(read, true)
}

// GaugeOf is a gauge that others keep, until stop.
func (s Set) GaugeOf(name, help string, read func() float64, labels ...prometheus.Labels) (stop func()) {
	return s.sum(name, help, prometheus.GaugeValue, labels).add(read, false)
}

func (s Set) sum(name, help string, kind prometheus.ValueType, labels []prometheus.Labels) *sum {
	of := prometheus.Labels{}
	for _, l := range labels {
		maps.Copy(of, l)
	}
	return register(s.registry, &sum{
		desc: prometheus.NewDesc(prometheus.BuildFQName("meander", s.service, name), help, nil, of),
		kind: kind, parts: map[int]func() float64{},
	})
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
