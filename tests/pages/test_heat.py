import torch

from bilens.pages import heat_figure


def test_a_table_keeps_its_numbers_names_and_blanks():
    values = torch.tensor([[1.0, -2.0, torch.nan], [0.5, 0.0, 0.25]])
    figure = heat_figure(values, ["a", "<b>"], ['" x"', "x", "z"], title="<t>", down="looks")
    trace = figure.data[0]
    assert [list(row) for row in trace.z[1:]] == [[0.5, 0.0, 0.25]]
    assert trace.z[0][2] != trace.z[0][2]
    assert (trace.zmin, trace.zmax) == (-2, 2)
    assert trace.colorscale[-1][1] == "#053061"
    assert trace.text[1][0] == '&lt;b&gt; · " x"'
    assert figure.layout.yaxis.ticktext == ("a", "&lt;b&gt;")
    assert figure.layout.yaxis.autorange == "reversed"
    assert figure.layout.xaxis.ticktext == ('" x"', "x", "z")
    assert figure.layout.title.text == "&lt;t&gt;"


def test_shares_are_on_a_scale_from_none_to_all():
    figure = heat_figure(torch.tensor([[0.5, 0.0]]), ["a"], ["x", "y"], title="", shares=True)
    trace = figure.data[0]
    assert (trace.zmin, trace.zmax) == (0, 1)
    assert [trace.colorscale[0][1], trace.colorscale[-1][1]] == ["#f7f7f7", "#053061"]


def test_names_that_do_not_fit_are_left_to_the_pointer():
    figure = heat_figure(torch.zeros(60, 2), [f"r{i}" for i in range(60)], ["a", "b"], title="")
    assert figure.layout.yaxis.ticktext in ((), None)
    assert figure.data[0].text[59][1] == "r59 · b"
