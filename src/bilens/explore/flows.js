const place = element.querySelector(".flow");
const remove = (names) => { props.value = JSON.stringify(names); trigger("input"); };
const draw = () => {
  place.hidden = !props.graph;
  if (props.graph) bilensFlow(place, JSON.parse(props.graph), remove);
};
watch("graph", draw);
draw();
